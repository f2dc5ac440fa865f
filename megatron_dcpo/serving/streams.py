"""A streamed reply: its events are passed on as they come, the confidence block is withheld from
the text even if it is cut across events, and the last event of each choice has its confidence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from megatron_dcpo.serving.asking import Asked, hide_logprobs, list_of
from megatron_dcpo.serving.replies import Scoring, compact, index_of
from megatron_dcpo.serving.scorer import Scorer
from megatron_dcpo.serving.withholding import safe_length

_DATA = b"data:"
_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
# an event is one chunk of a choice; a server that sends more without an end is not one
LONGEST_EVENT = 16 << 20

Chunk = dict[str, Any]


class StreamedChoice:
    """The chunks of one choice, put together again, and what of its text is still withheld."""

    def __init__(self, asked: Asked, scorer: Scorer) -> None:
        self.asked = asked
        self.scorer = scorer
        self.text = ""
        self.thinking = ""
        self.sent = 0  # characters of the text that the client has
        self.rows: list[Any] = []
        self.tokens: list[Any] = []
        self.logprobs: list[Any] = []
        self.tops: list[Any] = []
        self.is_over = False
        self.keeps_text = asked.shows_logprobs or scorer.keep_tag

    def take(self, choice: Chunk) -> None:
        """Read a chunk, and change its text into what can be shown by now."""
        self._read_logprobs(choice.get("logprobs"))
        hide_logprobs(choice, self.asked)
        piece = self._read_text(choice)
        if not piece:
            return
        if self.keeps_text:
            self.sent = len(self.text)
            return
        withheld = self.text[self.sent :]
        safe = safe_length(withheld, self.scorer.marker)
        self.write_text(choice, withheld[:safe])
        self.sent += safe

    def whole(self, finish_reason: object) -> Chunk:
        """Return the choice as a reply that is not streamed has it."""
        if self.asked.api == "chat":
            message = {"content": self.text, "reasoning_content": self.thinking}
            logged: Chunk | None = None
            if self.rows:
                logged = {"content": self.rows}
            return {"message": message, "logprobs": logged, "finish_reason": finish_reason}
        logged = None
        if self.logprobs:
            logged = {
                "tokens": self.tokens,
                "token_logprobs": self.logprobs,
                "top_logprobs": self.tops,
            }
        return {"text": self.text, "logprobs": logged, "finish_reason": finish_reason}

    def finish(self, choice: Chunk, shown: str) -> None:
        """Write what is left of the ``shown`` text into the last chunk."""
        self.is_over = True
        rest = self._piece_of(choice) + shown[self.sent :]
        if rest:
            self.write_text(choice, rest)
        self.sent = len(self.text)

    def withheld(self) -> str:
        """Return the text that the client does not have."""
        return self.text[self.sent :]

    def _read_text(self, choice: Chunk) -> str:
        """Return the text of a chunk, which is added to the whole."""
        if self.asked.api == "chat":
            delta = choice.get("delta")
            if isinstance(delta, dict):
                thinking = delta.get("reasoning_content") or delta.get("reasoning")
                if isinstance(thinking, str):
                    self.thinking += thinking
        piece = self._piece_of(choice)
        self.text += piece
        return piece

    def _piece_of(self, choice: Chunk) -> str:
        holder = choice
        name = "text"
        if self.asked.api == "chat":
            holder = choice.get("delta")  # type: ignore[assignment]
            name = "content"
        piece = holder.get(name) if isinstance(holder, dict) else None
        return piece if isinstance(piece, str) else ""

    def write_text(self, choice: Chunk, text: str) -> None:
        """Make a text that of a chunk."""
        if self.asked.api != "chat":
            choice["text"] = text
            return
        if not isinstance(choice.get("delta"), dict):
            choice["delta"] = {}
        choice["delta"]["content"] = text

    def _read_logprobs(self, logged: object) -> None:
        if not isinstance(logged, dict):
            return
        if self.asked.api == "chat":
            self.rows += list_of(logged, "content")
            return
        self.tokens += list_of(logged, "tokens")
        self.logprobs += list_of(logged, "token_logprobs")
        self.tops += list_of(logged, "top_logprobs")


class Stream:
    """The events of one reply. ``feed`` takes bytes as they come and returns those to pass on."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self.choices: dict[int, StreamedChoice] = {}
        self.rest = b""
        self.last: Chunk = {}

    async def feed(self, piece: bytes) -> bytes:
        """Return what the client gets for a piece of the upstream's stream. Raises ValueError for
        an event that has no end.
        """
        self.rest += piece
        out = []
        for event in self._events():
            out.append(await self._event(event))
        if len(self.rest) > LONGEST_EVENT:
            raise ValueError(f"an event of more than {LONGEST_EVENT >> 20} MB")
        return b"".join(out)

    def end(self) -> bytes:
        """Return what is left after the upstream's last byte, whether or not it was complete: text
        that is still withheld, and an event without an end.
        """
        chunks = []
        for index, choice in self.choices.items():
            text = choice.withheld()
            if choice.is_over or not text:
                continue
            last: Chunk = {"index": index, "finish_reason": None}
            choice.write_text(last, text)
            choice.sent = len(choice.text)
            chunks.append(_event_of({**self.last, "choices": [last]}))
        rest = self.rest
        self.rest = b""
        return b"".join([*chunks, rest])

    def _events(self) -> Iterator[bytes]:
        """Yield the complete events, with the empty line that ends each."""
        start = 0
        for end in _END_OF_EVENT.finditer(self.rest):
            yield self.rest[start : end.end()]
            start = end.end()
        self.rest = self.rest[start:]

    async def _event(self, event: bytes) -> bytes:
        """Return an event as the client gets it; one that holds no choices as it is."""
        if not event.startswith(_DATA):
            return event
        try:
            chunk = json.loads(event[len(_DATA) :])
        except (ValueError, RecursionError):  # [DONE], or several lines
            return event
        if not isinstance(chunk, dict) or not isinstance(chunk.get("choices"), list):
            return event
        self.last = {name: chunk[name] for name in chunk if name != "usage"}
        for position, choice in enumerate(chunk["choices"]):
            if isinstance(choice, dict):
                index = index_of(choice, position)
                await self._choice(choice, index, str(chunk.get("id") or ""))
        return _event_of(chunk)

    async def _choice(self, choice: Chunk, index: int, name: str) -> None:
        if index not in self.choices:
            asked = self.scoring.asked
            self.choices[index] = StreamedChoice(asked, self.scoring.scorer)
        streamed = self.choices[index]
        streamed.take(choice)
        reason = choice.get("finish_reason")
        if reason is None or streamed.is_over:
            return
        scored = await self.scoring.score(streamed.whole(reason), index)
        scorer = self.scoring.scorer
        shown = scorer.shown(streamed.text, self.scoring.asked, scored)
        streamed.finish(choice, shown)
        choice.update(scored.fields())
        self.scoring.told(name, index, scored)


def _event_of(chunk: Chunk) -> bytes:
    return b"data: " + compact(chunk) + b"\n\n"
