"""A session: the calls of one agent on one problem, and the one response that they become.

A :class:`Call` gets a prompt (:class:`CallPrompt`) and a place in the session
(:class:`PlannedCall`), and once an engine has answered, it is a :class:`Turn` for each of its
choices: the tokens that the engine was given, and those it has sampled. A call whose prompt goes on
from a turn is its child. So a session is a tree, and a response has one segment for each path that
is not part of another (:meth:`Session.response`). Nothing here knows HTTP, processes or engines.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_dcpo.data.chat_template import PROMPT_TOKENS
from megatron_dcpo.judging.confidence import CONFIDENCE_TOKENS, confidence_line, parse_number
from megatron_dcpo.rollout.chat_messages import (
    Message,
    MessageError,
    begins_with,
    reply_of,
)
from megatron_dcpo.rollout.chat_tokens import ChatTokens, Tools
from megatron_dcpo.rollout.engine import earlier_first
from megatron_dcpo.types import FinishReason, Prompt, Response


class CallRefused(Exception):
    """A call is not answered: the ``status`` of HTTP, a ``code`` of OpenAI's, words, and the
    ``field`` that is wrong, if one is.
    """

    def __init__(self, status: int, code: str, words: str, field: str = "") -> None:
        super().__init__(words)
        self.status = status
        self.code = code
        self.field = field


@dataclass(frozen=True)
class SessionLimits:
    """``response_tokens`` is what a session may sample and be told behind its first prompt,
    ``sequence_tokens`` the longest prompt and response that the engine takes, ``calls`` the most
    calls.
    """

    response_tokens: int
    sequence_tokens: int
    calls: int


@dataclass(frozen=True)
class Call:
    """What an agent wants of the policy: an answer to a chat (``messages``, ``tools``), or to go on
    from a ``text``, or from its ``token_ids``; the most tokens, the texts at which it ends, and how
    many choices.
    """

    messages: tuple[Message, ...] = ()
    tools: Tools = ()
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    choices: int = 1
    ignored: int = 0  # options that the run has pinned, and names of who speaks

    @property
    def is_chat(self) -> bool:
        return self.text is None and self.token_ids is None

    @cached_property
    def characters(self) -> int:
        """Return how many characters are to be encoded, tools and arguments as JSON."""
        texts = [self.text or ""]
        for part in (*self.messages, *self.tools):
            for value in part.values():
                is_text = isinstance(value, str)
                texts.append(value if is_text else json.dumps(value, ensure_ascii=False))
        return sum(map(len, texts))


@dataclass(frozen=True)
class CallPrompt:
    """The prompt of a call, which goes on behind the first ``kept`` sampled tokens of ``parent`` if
    there is one. ``retokenized``: tokens that were encoded again although their text had ids.
    """

    token_ids: tuple[int, ...]
    parent: Turn | None = None
    kept: int = 0
    retokenized: int = 0

    @property
    def written(self) -> tuple[int, ...]:
        """Return the tokens behind those that are the parent's."""
        if self.parent is None:
            return ()
        return self.token_ids[len(self.parent.prompt.token_ids) + self.kept :]


@dataclass(frozen=True)
class PlannedCall:
    """A call that the engine is to answer. ``names`` are the ids of its choices: no other call has
    them, and the random numbers are theirs.
    """

    call: Call
    prompt: CallPrompt
    max_tokens: int
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Turn:
    """A call that was answered. ``answer`` is what the agent gets; ``history`` are the messages
    with it, or ``text`` the whole text. ``hidden`` is what the policy has written behind the
    answer, from a stop text on. ``versions`` are the weights version and the number of tokens of
    each part of what the engine has sampled.
    """

    call: Call
    prompt: CallPrompt
    name: str
    sampled: np.ndarray
    logprobs: np.ndarray
    experts: np.ndarray | None
    finish_reason: FinishReason
    versions: tuple[tuple[int, int], ...]
    step: int
    answer_tokens: int  # before the stop text, or the end token
    answer: str
    text: str
    hidden: str
    history: tuple[Message, ...] = ()
    created: int = 0  # seconds since 1970, for the client

    @property
    def parent(self) -> Turn | None:
        return self.prompt.parent

    @property
    def reply(self) -> Message:
        """Return the answer to a chat as a message."""
        return self.history[-1]


class _Branch(NamedTuple):
    """What the policy stated behind an answer that was not the last: the number of that turn, the
    tokens, and the confidence, None if it is malformed.
    """

    turn: int
    stated: Turn
    confidence: float | None


@dataclass
class Session:
    """What an agent and the policy say about ``prompt``, as response ``index``. ``chat`` encodes
    it; ``turns`` are the answered calls, in their order.

    A call is looked at before it is encoded (:meth:`admit`), encoded (:meth:`encode`, which changes
    nothing and may run in another thread), counted (:meth:`plan`), and answered (:meth:`commit`).
    """

    prompt: Prompt
    index: int
    chat: ChatTokens
    limits: SessionLimits
    turns: list[Turn] = field(default_factory=list)
    is_sealed: bool = False
    calls: int = 0
    used: int = 0  # tokens behind the first prompt: what the policy said, and what it was given
    retokenized: int = 0
    ignored: int = 0
    is_out_of_budget: bool = False  # the last call was refused because of it
    _seen: Counter[bytes] = field(default_factory=Counter)
    _confidence: Turn | None = None
    _branches: list[_Branch] = field(default_factory=list)

    # ------------------------------------------------------------------------------------- calls
    def admit(self, call: Call) -> None:
        """Raise :class:`CallRefused` for a call that is refused whatever its tokens are: a token
        has so many characters at most, and a message or a tool at least a token.
        """
        if self.is_sealed:
            raise session_is_over()
        if self.calls + call.choices > self.limits.calls:
            self.is_out_of_budget = True
            raise CallRefused(
                400,
                "too_many_calls",
                f"this session has used up its {self.limits.calls} calls (rollout.agent_calls)",
            )
        most = self.limits.sequence_tokens
        parts = len(call.messages) + len(call.tools)
        if parts > most or call.characters > most * self.chat.longest_token:
            raise self._no_tokens_left()

    def encode(self, call: Call) -> CallPrompt:
        """Return the prompt of a call. Raises :class:`CallRefused` for what cannot be encoded."""
        try:
            if call.token_ids is not None:
                return self._prompt_of_ids(call.token_ids)
            if call.text is not None:
                return self._text_prompt(call.text)
            return self._chat_prompt(call)
        except MessageError as error:
            raise CallRefused(400, "invalid_request_error", str(error)) from None

    def plan(self, call: Call, prompt: CallPrompt) -> PlannedCall:
        """Return a call with its place in the session; it counts from now on. Raises
        :class:`CallRefused`.
        """
        self.admit(call)  # others may have come while it was encoded
        max_tokens = self._room(call, prompt)
        self.is_out_of_budget = False  # an agent may have made its history shorter
        self.calls += call.choices
        self.retokenized += prompt.retokenized
        self.ignored += call.ignored
        names = tuple(self._name_of(prompt) for _ in range(call.choices))
        return PlannedCall(call, prompt, max_tokens, names)

    def commit(self, planned: PlannedCall, responses: Sequence[Response]) -> list[Turn]:
        """Add the engine's responses to a call, one for each of its choices; return them. Raises
        :class:`CallRefused` if the session is over, or if calls beside it have taken all its
        tokens.
        """
        if self.is_sealed:
            raise session_is_over()
        room = self._left(planned.prompt)
        turns = []
        for name, response in zip(planned.names, responses, strict=True):
            response = _cut(response, room)
            room -= len(response.token_ids)
            if not len(response.token_ids):
                raise self._no_tokens_left()
            turns.append(self._turn(planned, name, response))
        # choice 0 is the last answer, if nothing comes after it
        self.turns += reversed(turns)
        self.used = self.limits.response_tokens - room
        return turns

    def _chat_prompt(self, call: Call) -> CallPrompt:
        if call.tools:
            self.chat.check_tools()
        fits = [
            turn
            for turn in self.turns
            if turn.call.is_chat
            and turn.call.tools == call.tools
            and begins_with(call.messages, turn.history)
        ]
        if not fits:
            return CallPrompt(tuple(self.chat.encode_chat(call.messages, call.tools)))
        turn = max(fits, key=lambda one: len(one.history))  # of several the first
        end = self.chat.turn_end
        ends_turn = end is not None and len(turn.sampled) > 0 and int(turn.sampled[-1]) == end
        kept = len(turn.sampled) if ends_turn and not turn.hidden else turn.answer_tokens
        said = turn.sampled[:kept]
        new = call.messages[len(turn.history) :]
        behind = self.chat.continued(turn.history, new, call.tools, said)
        cut = self._text_behind(turn, kept)
        if behind is None or cut is None:
            # with the reasoning that the client has left out
            return _again(self.chat.encode_chat([*turn.history, *new], call.tools))
        return self._behind(turn, kept, cut, behind)

    def _text_prompt(self, text: str) -> CallPrompt:
        fits = [turn for turn in self.turns if not turn.call.is_chat and text.startswith(turn.text)]
        if fits:
            turn = max(fits, key=lambda one: len(one.text))
            return self._text_behind_turn(turn, text[len(turn.text) :])
        first = self.chat.text_of(self.prompt.token_ids)
        if first and text.startswith(first):
            return CallPrompt((*self.prompt.token_ids, *self.chat.encode(text[len(first) :])))
        token_ids = self.chat.encode_from_start(text)
        if not token_ids:
            raise MessageError("the prompt has no tokens")
        return CallPrompt(tuple(token_ids))

    def _text_behind_turn(self, turn: Turn, rest: str) -> CallPrompt:
        """Return the prompt that goes on from a turn with the text ``rest``, which begins with the
        stop text if the agent has put that back.
        """
        kept = turn.answer_tokens
        cut = self._text_behind(turn, kept)
        if turn.hidden and rest.startswith(turn.hidden):
            kept = len(turn.sampled) - self.chat.has_ended(turn.sampled)
            rest = rest[len(turn.hidden) :]
            cut = ""
        if cut is None:
            return _again(self.chat.encode_from_start(turn.text + rest))
        return self._behind(turn, kept, cut, self.chat.encode(rest))

    def _behind(self, turn: Turn, kept: int, cut: str, behind: Sequence[int]) -> CallPrompt:
        """Return the prompt that goes on behind the first ``kept`` sampled tokens of a turn, with
        the text ``cut`` that these lack.
        """
        again = self.chat.encode(cut)
        said = turn.sampled[:kept].tolist()
        token_ids = (*turn.prompt.token_ids, *said, *again, *behind)
        return CallPrompt(token_ids, turn, kept, len(again))

    def _text_behind(self, turn: Turn, kept: int) -> str | None:
        """Return the end of a turn's answer that its first ``kept`` tokens lack, because a stop
        text begins within a token: "" mostly. None if the text has no such end.
        """
        if not turn.hidden or kept > turn.answer_tokens:
            return ""
        begin = self.chat.bytes_of(turn.sampled[:kept])
        answer = turn.answer.encode()
        if not answer.startswith(begin):
            return None
        return answer[len(begin) :].decode(errors="replace")

    def _prompt_of_ids(self, token_ids: tuple[int, ...]) -> CallPrompt:
        if not token_ids:
            raise MessageError("the prompt has no tokens")
        size = len(self.chat.tokens.table)
        if not all(0 <= token < size for token in token_ids):
            raise MessageError(f"token ids must be from 0 to {size - 1}")
        longest = 0
        prompt = CallPrompt(token_ids)
        for turn in self.turns:
            for kept in {len(turn.sampled), turn.answer_tokens}:
                ids = (*turn.prompt.token_ids, *turn.sampled[:kept].tolist())
                if len(ids) > longest and token_ids[: len(ids)] == ids:
                    longest = len(ids)
                    prompt = CallPrompt(token_ids, turn, kept)
        return prompt

    def _left(self, prompt: CallPrompt) -> int:
        """Return how many tokens may be sampled behind a prompt, of all choices together."""
        return self.limits.response_tokens - self.used - len(prompt.written)

    def _room(self, call: Call, prompt: CallPrompt) -> int:
        """Return how many tokens each choice may have. Raises :class:`CallRefused` if there is
        none.
        """
        left = self._left(prompt) // call.choices
        left = min(left, self.limits.sequence_tokens - len(prompt.token_ids))
        if left < 1:
            raise self._no_tokens_left()
        return left if call.max_tokens is None else min(left, call.max_tokens)

    def _no_tokens_left(self) -> CallRefused:
        self.is_out_of_budget = True
        return CallRefused(
            400,
            "context_length_exceeded",
            # verifiers looks for the words "context length"
            f"this session has no tokens left: its context length is "
            f"{self.limits.response_tokens} after its first prompt "
            f"(rollout.max_response_length), {self.limits.sequence_tokens} in all",
        )

    def _name_of(self, prompt: CallPrompt) -> str:
        """Return the id of a call: it depends on its prompt, and on how many calls with the same
        prompt came before it.
        """
        ids = np.asarray(prompt.token_ids, np.int64)
        digest = hashlib.blake2b(ids.tobytes(), digest_size=8).digest()
        self._seen[digest] += 1
        return f"{self.prompt.prompt_id}/{self.index}/{digest.hex()}/{self._seen[digest]}"

    def _turn(self, planned: PlannedCall, name: str, response: Response) -> Turn:
        call = planned.call
        sampled = response.token_ids
        ended = self.chat.has_ended(sampled)
        whole = self.chat.bytes_of(sampled[: len(sampled) - ended])
        at = stop_in(whole, call.stop)
        tokens = len(sampled) - ended
        if at is not None:
            tokens = self._tokens_within(sampled[:tokens], at)
        answer = whole[:at].decode(errors="replace")
        hidden = "" if at is None else whole[at:].decode(errors="replace")
        history: tuple[Message, ...] = ()
        text_before = ""
        if call.is_chat:
            reply = reply_of(
                answer,
                self.chat.tags,
                self.chat.bytes_of(planned.prompt.token_ids[-PROMPT_TOKENS:]),
                parses_calls=bool(call.tools),
                name=name.rpartition("/")[0].rpartition("/")[2] + name.rpartition("/")[2],
            )
            history = (*self._history_of(planned), reply)
        else:
            text_before = call.text or self.chat.text_of(call.token_ids or ())
        return Turn(
            call=call,
            prompt=planned.prompt,
            name=name,
            sampled=sampled,
            logprobs=response.logprobs,
            experts=response.experts,
            finish_reason="stop" if at is not None or ended else response.finish_reason,
            versions=response.versions,
            step=response.step,
            answer_tokens=tokens,
            answer=answer,
            text=text_before + answer,
            hidden=hidden,
            history=history,
            created=int(time.time()),
        )

    def _history_of(self, planned: PlannedCall) -> tuple[Message, ...]:
        """Return the messages of a call, ours for those that are ours: with their reasoning."""
        parent = planned.prompt.parent
        messages = planned.call.messages
        if parent is None:
            return messages
        return (*parent.history, *messages[len(parent.history) :])

    def _tokens_within(self, sampled: np.ndarray, size: int) -> int:
        """Return how many tokens lie within the first ``size`` bytes."""
        ends = np.cumsum([len(piece) for piece in self.chat.tokens.pieces(sampled)])
        return int(np.searchsorted(ends, size, side="right"))

    # -------------------------------------------------------------------------------- the response
    def ask_confidence(self, marker: str) -> PlannedCall | None:
        """Return the call that has the policy go on behind its last answer with a confidence. None
        if it has stated one, or has given no answer, or if there is no room.
        """
        if not self.turns:
            return None
        prompt = self._confidence_prompt(self.turns[-1], marker)
        if prompt is None:
            return None
        left = self.limits.sequence_tokens - len(prompt.token_ids)
        left = min(self._left(prompt), left, CONFIDENCE_TOKENS)
        if left < 1:
            return None
        return PlannedCall(Call(text=""), prompt, left, (self._name_of(prompt),))

    def ask_earlier_confidences(self, marker: str) -> list[PlannedCall]:
        """Return the calls that have the policy state a confidence behind each answer before the
        last, by the number of the turn. They use nothing of what the session may sample.
        """
        planned = []
        # by name: in which order calls have come does not matter
        for turn in sorted(self.turns[:-1], key=lambda one: (self._number_of(one), one.name)):
            prompt = self._confidence_prompt(turn, marker)
            if prompt is None:
                continue
            left = min(self.limits.sequence_tokens - len(prompt.token_ids), CONFIDENCE_TOKENS)
            if left >= 1:
                names = (self._name_of(prompt),)
                planned.append(PlannedCall(Call(text=""), prompt, left, names))
        return planned

    def _confidence_prompt(self, turn: Turn, marker: str) -> CallPrompt | None:
        """Return the prompt that asks for a confidence behind an answer, None if it has stated one,
        or if there is no answer.
        """
        ended = self.chat.has_ended(turn.sampled)
        kept = len(turn.sampled) - ended
        text = self.chat.text_of(turn.sampled[:kept])
        end_of_prompt = self.chat.bytes_of(turn.prompt.token_ids[-PROMPT_TOKENS:])
        line = confidence_line(text, self.chat.tags, end_of_prompt, marker)
        if line is None:
            return None
        opening = self.chat.encode(line)
        token_ids = (*turn.prompt.token_ids, *turn.sampled[:kept].tolist(), *opening)
        return CallPrompt(token_ids, turn, kept)

    def _number_of(self, turn: Turn) -> int:
        """Return the number of a turn: how many answers of the policy its conversation has, itself
        included; those that the problem came with do not count.
        """
        if turn.call.is_chat:
            given = _answers(self.prompt.messages)
            return max(1, _answers(turn.history) - given)
        number = 1
        while turn.parent is not None:
            turn = turn.parent
            number += 1
        return number

    def add_confidence(self, planned: PlannedCall, response: Response) -> None:
        """Add what the policy stated when it was asked; the session may be sealed."""
        self._confidence = self._turn(planned, planned.names[0], response)

    def add_earlier_confidence(self, planned: PlannedCall, response: Response, marker: str) -> None:
        """Add what the policy stated behind an earlier answer; the session may be sealed."""
        asked_behind = planned.prompt.parent
        assert asked_behind is not None
        if not len(response.token_ids):
            return
        stated = self._turn(planned, planned.names[0], response)
        parsed = parse_number(stated.answer, marker, stated.finish_reason == "stop")
        number = self._number_of(asked_behind)
        self._branches.append(_Branch(number, stated, parsed.confidence))

    def response(self, verdict: Mapping[str, Any] | None = None) -> Response:
        """Return the session as one response with a ``verdict``, if there is one. The last answer,
        with its confidence, is its last segment. Raises ValueError if the policy has said nothing.
        """
        if not self.turns:
            raise ValueError("the policy was never asked")
        answer = self.turns[-1]
        last = self._confidence or answer
        paths = self._paths(last)
        parts = _Parts()
        branch_ends = []
        for branch in self._branches:
            parts.begin(branch.stated.prompt.token_ids)
            parts.sample(branch.stated, None)
            branch_ends.append(parts.length)
        answer_from = 0
        for path in paths:
            parts.begin(path[0].prompt.token_ids)
            for number, turn in enumerate(path):
                if number:
                    parts.write(turn.prompt.written)
                if turn is answer:
                    answer_from = parts.length
                kept = path[number + 1].prompt.kept if number + 1 < len(path) else None
                parts.sample(turn, kept)
        token_ids, logprobs, loss_mask = parts.arrays()
        is_prompt_alone = parts.contexts == [self.prompt.token_ids]
        contexts: tuple[tuple[int, int], ...] = ()
        context_ids = None
        if not is_prompt_alone:
            counts = [len(context) for context in parts.contexts]
            contexts = tuple(zip(parts.starts, counts, strict=True))
            context_ids = np.array([i for context in parts.contexts for i in context], np.int64)
        sampled = [branch.stated for branch in self._branches]
        sampled += [turn for path in paths for turn in path]
        versions = _versions_of(sampled)
        return Response(
            prompt_id=self.prompt.prompt_id,
            sample_index=self.index,
            token_ids=token_ids,
            logprobs=logprobs,
            experts=parts.experts(),
            finish_reason="stop" if self._is_complete(last) else "length",
            weights_version=versions[-1][0],
            segments=versions if len(versions) > 1 else (),
            step=last.step,
            loss_mask=loss_mask,
            contexts=contexts,
            context_ids=context_ids,
            answer_from=answer_from,
            verdict=verdict,
            counted=self.counted(segments=len(paths)),
            turn_confidences=tuple((branch.turn, branch.confidence) for branch in self._branches),
            branch_ends=tuple(branch_ends),
        )

    def _is_complete(self, last: Turn) -> bool:
        """Return whether the last answer was not cut short, nor the session by its budget."""
        if self.is_out_of_budget and self._confidence is None:
            return False
        return last.finish_reason == "stop"

    def counted(self, segments: int) -> dict[str, float]:
        """Return what the metrics count of the session."""
        return {
            "agent_calls": float(len(self.turns)),
            "turns": float(self._number_of(self.turns[-1])),
            "segments": float(segments),
            "retokenized": float(self.retokenized),
            "sampling_ignored": float(self.ignored),
        }

    def _paths(self, last: Turn) -> list[list[Turn]]:
        """Return the turns of each segment, the one of the ``last`` turn at the end. A turn is in
        one path: a path that branches off another begins behind it.
        """
        owned: set[int] = set()
        main = _to_root(last, owned)
        owned.update(id(turn) for turn in main)
        others = [turn for turn in self.turns if id(turn) not in owned]
        with_children = {id(turn.parent) for turn in others}
        # by name: in which order calls have come does not matter
        leaves = sorted(
            (turn for turn in others if id(turn) not in with_children), key=lambda one: one.name
        )
        paths = []
        for leaf in leaves:
            path = _to_root(leaf, owned)
            owned.update(id(turn) for turn in path)
            paths.append(path)
        return [*paths, main]


def _answers(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of the messages are the policy's."""
    return sum(message.get("role") == "assistant" for message in messages)


def _to_root(turn: Turn, owned: set[int]) -> list[Turn]:
    """Return the turns from the first that is not ``owned`` to ``turn``."""
    path = [turn]
    while path[-1].parent is not None and id(path[-1].parent) not in owned:
        path.append(path[-1].parent)
    return path[::-1]


class _Parts:
    """The tokens of a response while it is put together."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.contexts: list[tuple[int, ...]] = []
        self.length = 0
        self._tokens: list[np.ndarray] = [np.zeros(0, np.int64)]
        self._logprobs: list[np.ndarray] = [np.zeros(0, np.float32)]
        self._mask: list[np.ndarray] = [np.zeros(0, np.bool_)]
        self._experts: list[np.ndarray | None] = []  # of each segment

    def begin(self, context: tuple[int, ...]) -> None:
        self.starts.append(self.length)
        self.contexts.append(context)
        self._experts.append(None)

    def write(self, token_ids: Sequence[int]) -> None:
        count = len(token_ids)
        self._tokens.append(np.array(token_ids, np.int64))
        self._logprobs.append(np.zeros(count, np.float32))
        self._mask.append(np.zeros(count, np.bool_))
        self.length += count

    def sample(self, turn: Turn, kept: int | None) -> None:
        self._tokens.append(np.asarray(turn.sampled[:kept], np.int64))
        self._logprobs.append(np.asarray(turn.logprobs[:kept], np.float32))
        count = len(self._tokens[-1])
        self._mask.append(np.ones(count, np.bool_))
        self.length += count
        if turn.experts is not None:
            rows = len(turn.prompt.token_ids) + count - 1
            self._experts[-1] = earlier_first(self._experts[-1], turn.experts[:rows])

    def experts(self) -> np.ndarray | None:
        """Return the choices of the engine for each segment, without its last token."""
        ends = [*self.starts[1:], self.length]
        rows = [
            len(context) + end - start - 1
            for context, start, end in zip(self.contexts, self.starts, ends, strict=True)
        ]
        return _one_after_another(self._experts, rows)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            np.concatenate(self._tokens),
            np.concatenate(self._logprobs),
            np.concatenate(self._mask),
        )


def _one_after_another(
    choices: Sequence[np.ndarray | None], rows: Sequence[int]
) -> np.ndarray | None:
    """Return the choices of several sequences as one array, so many ``rows`` of each, of which
    those without a choice are -1. None if no sequence has any.
    """
    recorded = next((one for one in choices if one is not None), None)
    if recorded is None:
        return None
    joined = np.full((sum(rows), *recorded.shape[1:]), -1, np.int16)
    begin = 0
    for one, count in zip(choices, rows, strict=True):
        if one is not None:
            taken = one[:count]
            joined[begin : begin + len(taken)] = taken
        begin += count
    return joined


def session_is_over() -> CallRefused:
    return CallRefused(409, "session_is_over", "this session is over")


def _again(token_ids: Sequence[int]) -> CallPrompt:
    """Return the prompt of another segment, encoded again as a whole."""
    return CallPrompt(tuple(token_ids), retokenized=len(token_ids))


def stop_in(text: bytes, stop: Sequence[str]) -> int | None:
    """Return where the first stop text begins in a text, None if none does."""
    places = [at for at in (text.find(one.encode()) for one in stop) if at >= 0]
    return min(places, default=None)


def _cut(response: Response, most: int) -> Response:
    """Return a response of at most so many tokens."""
    most = max(0, most)
    if len(response.token_ids) <= most:
        return response
    return replace(
        response,
        token_ids=response.token_ids[:most],
        logprobs=response.logprobs[:most],
        finish_reason="length",
    )


def _versions_of(turns: Iterable[Turn]) -> tuple[tuple[int, int], ...]:
    """Return the weights versions that have sampled ``turns``, oldest first, each with its number
    of tokens.
    """
    counts: Counter[int] = Counter()
    for turn in turns:
        for version, tokens in turn.versions:
            counts[version] += tokens
    return tuple(sorted(counts.items()))


def failed(prompt: Prompt, index: int, why: str, version: int, step: int) -> Response:
    """Return what stands for a session that gave no response."""
    return Response(
        prompt_id=prompt.prompt_id,
        sample_index=index,
        token_ids=np.zeros(0, np.int64),
        logprobs=np.zeros(0, np.float32),
        finish_reason="stop",
        weights_version=version,
        step=step,
        failure=why,
    )
