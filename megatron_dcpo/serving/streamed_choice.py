"""The chunks of one choice of a stream, put together again to what a reply that is not streamed
has, and what of its text the client may see by now: which end of a text that is still growing may
become the confidence block is withheld until that is known.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.events import Event
from megatron_dcpo.serving.finishing import calls_tool, finish_reason
from megatron_dcpo.serving.scorer import Scored, Scorer, Stated

Chunk = dict[str, Any]

# the lists of log-probs, in either form
_LOGGED = ("content", "tokens", "token_logprobs", "top_logprobs")
_WORD = "confidence"
# possessive: what one part has taken, no other one is tried with, so that the time is linear
_SPACE = r"[ \t\r\n\f\v]*+"
_NUMBER = rf"-?[0-9]*+(?:\.[0-9]*+)?{_SPACE}"
_BEGUN_WORDS = "|".join(_WORD[:size] for size in range(1, len(_WORD)))
# what may follow a marker up to the end of the text
_REST = re.compile(
    rf"{_SPACE}(?:{_NUMBER}|{_BEGUN_WORDS}|{_WORD}{_SPACE}(?::{_SPACE}{_NUMBER})?)\Z",
    re.IGNORECASE | re.ASCII,
)
_RESCANNED = 1024  # characters from which on a withheld text is not looked at for each piece
_GROWTH = 1.25


def safe_length(text: str, marker: str) -> int:
    """Return how many characters of a text can be shown: those before the first place from which
    on it is the beginning of a marker, or a marker and the beginning of a confidence.
    """
    safe = len(text)
    for size in range(1, len(marker)):
        if text.endswith(marker[:size]):
            safe = len(text) - size
    at = text.find(marker)
    while at >= 0:
        if _REST.match(text, at + len(marker)):
            return min(at, safe)
        at = text.find(marker, at + 1)
    return safe


class Withheld:
    """The end of a text that nobody has seen yet. A long one is looked at whenever it has grown by
    a quarter, so that the time is linear in the text.
    """

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.pieces: list[str] = []
        self.size = 0
        self.looked_at = 0

    def add(self, piece: str) -> str:
        """Take a piece of the text, and return what can be shown now."""
        self.pieces.append(piece)
        self.size += len(piece)
        if self.size > _RESCANNED and self.size < _GROWTH * self.looked_at:
            return ""
        text = "".join(self.pieces)
        safe = safe_length(text, self.marker)
        self.pieces = [text[safe:]]
        self.size = self.looked_at = len(text) - safe
        return text[:safe]

    def take(self) -> str:
        """Return all of it, which is withheld no longer."""
        text = "".join(self.pieces)
        self.pieces = []
        self.size = self.looked_at = 0
        return text


class StreamedChoice:
    """One choice. ``unreadable`` says what of it could not be read, "" for nothing: then it has no
    confidence, because its text or its log-probs may not be whole. ``stated`` is what the model
    stated behind it.
    """

    def __init__(self, asked: Asked, scorer: Scorer) -> None:
        self.asked = asked
        self.scorer = scorer
        self.keeps_text = asked.shows_logprobs or scorer.keep_tag
        self.withheld = Withheld(scorer.marker)
        self.sent = 0  # characters of the text that the client has
        self.unreadable = ""
        self.finish_reason: object = None
        self.ending: tuple[Event, Chunk] | None = None  # what seems to be its last event
        self.is_remembered = True
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._logged: dict[str, list[Any]] = {}
        self._has_logprobs: set[bool] = set()  # of the chunks with a text
        self._calls_tool = False
        self._prompt_ids: object = None
        self._ids: list[Any] = []
        self._lacks_ids = False
        self._stop_reason: object = None
        self.stated: Stated | None = None

    @property
    def text(self) -> str:
        """Return the text of all chunks."""
        return "".join(self._texts)

    def forget(self) -> None:
        """Remember no more of the choice than what is withheld of its text."""
        self.is_remembered = False
        self._logged.clear()
        self._texts.clear()
        self._thoughts.clear()
        self._ids.clear()

    def take(self, chunk: Chunk, logged: object) -> None:
        """Read a chunk with its log-probs, and change its text into what can be shown by now."""
        reason = finish_reason(chunk)
        if reason is not None:
            self.finish_reason = reason
            self._stop_reason = chunk.get("stop_reason")
        piece = self._read(chunk)
        self._read_ids(chunk, piece)
        has_logprobs = self._read_logprobs(logged)
        if not piece:
            return
        if self.is_remembered:
            self._texts.append(piece)
        self._has_logprobs.add(has_logprobs)
        if self.keeps_text:
            self.sent += len(piece)
            return
        safe = self.withheld.add(piece)
        self.write_text(chunk, safe)
        self.sent += len(safe)

    def whole(self) -> Chunk:
        """Return the choice as a reply that is not streamed has it."""
        ended: Chunk = {"finish_reason": self.finish_reason, "stop_reason": self._stop_reason}
        ended["prompt_token_ids"] = self._prompt_ids
        ended["token_ids"] = [] if self._lacks_ids else self._ids
        if self.asked.api != "chat":
            return {"text": self.text, "logprobs": dict(self._logged) or None, **ended}
        message: Chunk = {"content": self.text, "reasoning_content": "".join(self._thoughts)}
        if self._calls_tool:
            message["tool_calls"] = True
        return {"message": message, "logprobs": dict(self._logged) or None, **ended}

    def why_not_whole(self) -> str:
        """Return why what has been read is not the whole choice, "" if it is."""
        if len(self._has_logprobs) > 1:
            return "some chunks have log-probs and others have none"
        return self.unreadable

    def finish(self, chunk: Chunk, scored: Scored) -> None:
        """Write what is left of the text, and the confidence, into the last chunk."""
        withheld = self.withheld.take()
        if self.is_remembered:
            withheld = self.scorer.shown(self.text, self.asked, scored)[self.sent :]
        rest = self._text_in(chunk) + withheld
        if rest:
            self.write_text(chunk, rest)
        chunk.update(scored.fields())

    def last_chunk(self, index: int) -> Chunk:
        """Return a chunk without a text, for a choice whose last one is not there any more."""
        chunk: Chunk = {"index": index, "finish_reason": self.finish_reason, "logprobs": None}
        self.write_text(chunk, "")
        return chunk

    def write_text(self, chunk: Chunk, text: str) -> None:
        """Make a text that of a chunk."""
        if self.asked.api != "chat":
            chunk["text"] = text
            return
        if not isinstance(chunk.get("delta"), dict):
            chunk["delta"] = {}
        chunk["delta"]["content"] = text

    @property
    def _text_name(self) -> str:
        return "content" if self.asked.api == "chat" else "text"

    def _holder(self, chunk: Chunk) -> object:
        return chunk.get("delta") if self.asked.api == "chat" else chunk

    def _text_in(self, chunk: Chunk) -> str:
        holder = self._holder(chunk)
        text = holder.get(self._text_name) if isinstance(holder, dict) else None
        return text if isinstance(text, str) else ""

    def _read(self, chunk: Chunk) -> str:
        """Return the text of a chunk, and keep the rest of what it says."""
        holder = self._holder(chunk)
        others = ("text", "message") if self.asked.api == "chat" else ("delta", "message")
        if not isinstance(holder, dict | None) or any(chunk.get(name) for name in others):
            self.unreadable = "a chunk of another form"
        if not isinstance(holder, dict):
            return ""
        text = holder.get(self._text_name)
        thinking = None
        if self.asked.api == "chat":
            thinking = holder.get("reasoning_content") or holder.get("reasoning")
            self._calls_tool |= calls_tool(holder)
        if not isinstance(text, str | None) or not isinstance(thinking, str | None):
            self.unreadable = "a chunk whose text is no text"
        if isinstance(thinking, str) and self.is_remembered:
            self._thoughts.append(thinking)
        return text if isinstance(text, str) else ""

    def _read_ids(self, chunk: Chunk, piece: str) -> None:
        """Keep the ids of a chunk's tokens, and of the prompt's, which each may name. Behind a
        piece of the text without ids those of the answer are not whole.
        """
        rows = chunk.get("token_ids")
        if not isinstance(rows, list):
            self._lacks_ids |= bool(piece)
        elif self.is_remembered:
            self._ids += rows
        if prompt_ids := chunk.get("prompt_token_ids"):
            self._prompt_ids = prompt_ids

    def _read_logprobs(self, logged: object) -> bool:
        """Keep the log-probs of a chunk, and return whether there are any."""
        if not logged:
            return False
        if not isinstance(logged, dict):
            self.unreadable = "log-probs of another form"
            return False
        found = False
        for name in _LOGGED:
            rows = logged.get(name)
            if not isinstance(rows, list | None):
                self.unreadable = "log-probs of another form"
            if isinstance(rows, list) and rows:
                found = True
                if self.is_remembered:
                    self._logged.setdefault(name, []).extend(rows)
        return found
