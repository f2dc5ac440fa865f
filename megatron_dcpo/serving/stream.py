"""A streamed reply: its events are passed on as they come, the confidence block is withheld from
the text even if it is cut across events, and the last chunk of each choice has its confidence.

A choice is scored when the stream has ended, since text may follow a ``finish_reason``; until then
its last chunk is held back. What cannot be read is never passed on with log-probs that the client
did not ask for, and leaves the choices without a confidence.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

from megatron_dcpo.serving.asking import Asked, hide_added
from megatron_dcpo.serving.events import DONE, Event, EventDecoder
from megatron_dcpo.serving.finishing import finish_reason
from megatron_dcpo.serving.json_text import compact, error_body, objects_in, read_json
from megatron_dcpo.serving.scorer import FIELDS
from megatron_dcpo.serving.streamed_choice import Chunk, StreamedChoice
from megatron_dcpo.serving.whole_reply import ERROR_WITH_ANSWER, Scoring

_MOST_CHOICES = 4096  # that are told apart; OpenAI's servers give 128
_MOST_WAITING = 64
# an event with one of these is a piece of an answer, whatever its form
_OF_A_CHOICE = frozenset(
    ("delta", "text", "content", "token", "tokens", "logprobs", "finish_reason", "choices", "error")
)


class Stream:
    """The events of one reply. ``feed`` takes bytes as they come and returns those to pass on.
    ``is_complete`` says that the client has the whole answer, ``is_broken`` that it ends with an
    error.
    """

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self.asked: Asked = scoring.asked
        self.choices: dict[int, StreamedChoice] = {}
        self.waiting: list[bytes] = []  # events without choices, behind the end of a choice
        self.last: Chunk = {}
        self.prompt_ids: object = None
        self.unreadable = ""  # what could not be read, and may be of any choice
        self.is_complete = False
        self.is_broken = False
        self.size = 0
        self.decoder = EventDecoder(scoring.bounds.reply_bytes)

    async def feed(self, piece: bytes, is_last: bool = False) -> bytes:
        """Return what the client gets for a piece of the upstream's stream. Raises
        :class:`EventTooLongError`.
        """
        self.size += len(piece)
        if self.is_too_long:
            self._give_up("a stream that is longer than a reply may be")
            for choice in self.choices.values():
                choice.forget()
        out = []
        for event in self.decoder.feed(piece, is_last):
            out.append(await self._event(event))
        return b"".join(out)

    async def end(self) -> bytes:
        """Return what the client gets when the upstream's stream has ended. Raises as
        :meth:`feed`.
        """
        rest = await self.feed(b"", is_last=True)
        return rest + await self._complete()

    async def _complete(self, end: bytes = b"") -> bytes:
        """Return what the client gets at the ``end`` of the upstream's stream."""
        if self.is_complete:
            return b""
        if not self.choices and not self.unreadable:
            return await self.broken("the upstream's stream has no answer")
        await self._ask()  # which a client that leaves, or the end of the server, interrupts
        self.is_complete = True
        return await self._finish() + end

    async def broken(self, words: str) -> bytes:
        """Return the end of a stream that has no end of its own: what is left of the texts, without
        a confidence, an error and the word that it is over. An event that has only begun is lost.
        """
        if self.is_complete:
            return b""
        self._give_up(words)
        self.is_complete = self.is_broken = True
        rest = await self._finish()
        return rest + _error_event(words) + Event(DONE).encoded()

    def _give_up(self, words: str) -> None:
        """Leave every choice without a confidence."""
        self.unreadable = self.unreadable or words

    @property
    def is_too_long(self) -> bool:
        """Return whether no more of the stream is remembered, which is passed on all the same."""
        return self.size > self.scoring.bounds.reply_bytes

    async def _event(self, event: Event) -> bytes:
        """Return an event as the client gets it."""
        if event.data is None:
            return event.encoded()
        if self.is_complete:  # nobody reads on
            return b""
        if event.data.strip() == DONE:
            return await self._complete(event.encoded())
        try:
            value = read_json(event.data.encode())
        except ValueError:
            return self._not_json(event)
        chunk = value if isinstance(value, dict) else {}
        if not isinstance(chunk.get("choices"), list):
            is_answer = any(_OF_A_CHOICE & one.keys() for one in objects_in(value))
            if is_answer or not isinstance(value, dict):
                self._give_up("an event of another form")
            return self._without_choices(event, value)
        if not chunk["choices"]:
            return self._without_choices(event, value)
        return self._chunk(event, chunk)

    def _not_json(self, event: Event) -> bytes:
        """Pass an event on in which no log-probs can be hidden, or say that it is not shown."""
        if not (event.data or "").strip():
            return event.encoded()
        self._give_up("an event that is not JSON")
        if self.asked.adds:
            return _error_event("the upstream sent an event that is not JSON")
        return event.encoded()

    def _without_choices(self, event: Event, value: Any) -> bytes:  # noqa: ANN401 -- any JSON
        """Pass on what holds no choices, after the end of a choice if one waits."""
        hide_added(value, self.asked)
        content = _changed(event, value)
        is_behind = any(choice.ending for choice in self.choices.values())
        if is_behind and not self.is_too_long and len(self.waiting) < _MOST_WAITING:
            self.waiting.append(content)
            return b""
        return content

    def _chunk(self, event: Event, chunk: Chunk) -> bytes:
        """Return a chunk without the choices that end in it, which wait until they are scored."""
        self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
        if chunk.get("error"):
            self._give_up(ERROR_WITH_ANSWER)
        out = []
        going_on = []
        ending = []
        for choice in chunk["choices"]:
            if isinstance(choice, dict):  # a confidence of the upstream's is not ours
                for name in FIELDS:
                    choice.pop(name, None)
            one = self._choice(choice)
            if one is None:
                going_on.append(choice)
                continue
            out.append(_released(one))
            self._take(one, choice)
            if finish_reason(choice) is not None:
                ending.append((one, choice))
            elif not self.asked.adds_ids or choice.get("delta") != {}:
                going_on.append(choice)  # a chunk of ids alone is not the client's
        hide_added(chunk, self.asked)
        self.last = {name: chunk[name] for name in chunk if name not in ("usage", "choices")}
        if going_on:
            out.append(_changed(event, {**chunk, "choices": going_on}))
            chunk.pop("usage", None)
        for one, choice in ending:
            out.append(_released(one))
            one.ending = (event, {**chunk, "choices": [choice]})
            chunk.pop("usage", None)
        return b"".join(out)

    def _take(self, one: StreamedChoice, choice: Chunk) -> None:
        """Read the chunk of a choice."""
        logged = choice.get("logprobs")
        if self.asked.adds_logprobs and self.asked.shows_logprobs:
            # fewer of them are shown than are read
            logged = copy.deepcopy(logged)
        one.take(choice, logged)
        if self.is_too_long:
            one.forget()

    def _choice(self, choice: object) -> StreamedChoice | None:
        """Return the choice that a chunk is of; None, and no confidence for any, if it is not one
        of those that were asked for.
        """
        count = self.asked.choices
        if not isinstance(choice, dict):
            self._give_up("a choice of another form")
            return None
        index = choice.get("index")
        if index is None and count == 1:
            index = 0
        if isinstance(index, int) and not isinstance(index, bool):
            if index in self.choices:
                return self.choices[index]
            is_asked = index >= 0 and (count is None or index < count)
            if is_asked and not self.is_too_long and len(self.choices) < _MOST_CHOICES:
                self.choices[index] = StreamedChoice(self.asked, self.scoring.scorer)
                return self.choices[index]
        self._give_up("a choice with an index that was not asked for")
        return None

    async def _ask(self) -> None:
        """Ask for the number behind each choice that could be read."""
        branch = self.scoring.branch
        if branch is None or self.unreadable:
            return
        choices = [one for one in self.choices.values() if not one.why_not_whole()]
        asked = (branch.stated(one.whole(), self.prompt_ids) for one in choices)
        for one, stated in zip(choices, await asyncio.gather(*asked), strict=True):
            one.stated = stated

    async def _finish(self) -> bytes:
        """Return the last chunk of each choice, with its confidence, and what waits behind."""
        out = []
        for index, choice in self.choices.items():
            event, chunk = Event(), {**self.last, "choices": [choice.last_chunk(index)]}
            if choice.ending is not None:
                event, chunk = choice.ending
            unreadable = self.unreadable or choice.why_not_whole()
            scored = await asyncio.to_thread(
                self.scoring.score, choice.whole(), unreadable, choice.stated
            )
            choice.finish(chunk["choices"][0], scored)
            out.append(_changed(event, chunk))
        return b"".join(out + self.waiting)


def _released(one: StreamedChoice) -> bytes:
    """Return the event that was taken for the last one of a choice that goes on."""
    if one.ending is None:
        return b""
    event, chunk = one.ending
    chunk["choices"][0]["finish_reason"] = None
    one.ending = None
    return _changed(event, chunk)


def _changed(event: Event, value: Any) -> bytes:  # noqa: ANN401 -- any JSON
    """Return an event with other data."""
    return replace(event, data=compact(value).decode()).encoded()


def _error_event(words: str) -> bytes:
    """Return an event that says what went wrong at the upstream."""
    return Event(compact(error_body(502, words)).decode()).encoded()
