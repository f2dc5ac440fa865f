"""A whole reply: the confidence of each of its choices, and the choices as the client gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dcpo.serving import exact_json
from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.exact_json import compact
from megatron_dcpo.serving.hiding import hide_logprobs
from megatron_dcpo.serving.limits import LONGEST_ID, ServeLimits
from megatron_dcpo.serving.scorer import FIELDS, Scored, Scorer

# returns the confidence of a choice, given what of it could not be read
Score = Callable[[dict[str, Any], str], Awaitable[Scored]]
# is told the id of a response, the index of a choice and its confidence
Told = Callable[[str, int, Scored], None]

ERROR_WITH_ANSWER = "the upstream sent an error together with the answer"
_LARGE = 1 << 20  # bytes from which on a reply is read in another thread


class NotHiddenError(Exception):
    """In a reply of another form than OpenAI's the log-probs cannot be hidden."""


@dataclass(frozen=True)
class Scoring:
    """How the choices of one request are scored and shown, and who is told."""

    asked: Asked
    scorer: Scorer
    score: Score
    told: Told
    limits: ServeLimits = field(default_factory=ServeLimits)


async def scored_reply(content: bytes, scoring: Scoring) -> bytes:
    """Return the body of a reply with a confidence in each choice; one that is no reply of this
    kind is returned as it is, without log-probs that the client did not ask for. Raises
    :class:`NotHiddenError`.
    """
    if len(content) < _LARGE:
        reply = _read(content, scoring.asked)
    else:
        reply = await asyncio.to_thread(_read, content, scoring.asked)
    if reply is None:
        return content
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list):
        hide_logprobs(reply, scoring.asked)
        return compact(reply) if scoring.asked.adds_logprobs else content
    for position, choice in enumerate(choices):
        if isinstance(choice, dict):
            index = index_of(choice, position)
            unreadable = ERROR_WITH_ANSWER if reply.get("error") else ""
            scored = await scoring.score(choice, unreadable)
            _show(choice, scoring, scored)
            scoring.told(answer_id(reply), index, scored)
    hide_logprobs(reply, scoring.asked)
    if len(content) < _LARGE:
        return compact(reply)
    return await asyncio.to_thread(compact, reply)


def _read(content: bytes, asked: Asked) -> Any:  # noqa: ANN401 -- any JSON
    """Return the value of a reply, None if it is not JSON."""
    try:
        return exact_json.loads(content)
    except ValueError:
        if asked.adds_logprobs:
            raise NotHiddenError("the upstream's answer is not JSON") from None
        return None


def _show(choice: dict[str, Any], scoring: Scoring, scored: Scored) -> None:
    """Change a choice into what the client gets."""
    asked = scoring.asked
    holder: object = choice
    name = "text"
    if asked.api == "chat":
        holder = choice.get("message")
        name = "content"
    if isinstance(holder, dict) and isinstance(holder.get(name), str):
        holder[name] = scoring.scorer.shown(holder[name], asked, scored)
    choice.update(scored.fields())


def drop_fields(choice: object) -> None:
    """Take away a confidence that the upstream has put into a choice."""
    if isinstance(choice, dict):
        for name in FIELDS:
            choice.pop(name, None)


def index_of(choice: Mapping[str, Any], position: int) -> int:
    """Return the index of a choice, its position if it has none."""
    index = choice.get("index")
    if isinstance(index, bool) or not isinstance(index, int):
        return position
    return index


def answer_id(reply: Mapping[str, Any]) -> str:
    """Return the id under which an answer is remembered, "" for one that nobody would name."""
    name = reply.get("id")
    return name if isinstance(name, str) and len(name) <= LONGEST_ID else ""


def error_body(status: int, words: str) -> dict[str, Any]:
    """Return an error in the form of OpenAI's."""
    kind = "upstream_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": words, "type": kind, "param": None, "code": status}}
