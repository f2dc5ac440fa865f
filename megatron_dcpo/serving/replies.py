"""A whole reply: the confidence of each of its choices, and the choices as the client gets them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.serving.asking import Asked, hide_logprobs
from megatron_dcpo.serving.scorer import Scored, Scorer

# returns the confidence of a whole choice, given its index
Score = Callable[[dict[str, Any], int], Awaitable[Scored]]
# is told the id of a response, the index of a choice and its confidence
Told = Callable[[str, int, Scored], None]


@dataclass(frozen=True)
class Scoring:
    """How the choices of one request are scored and shown, and who is told."""

    asked: Asked
    scorer: Scorer
    score: Score
    told: Told


async def scored_reply(content: bytes, scoring: Scoring) -> bytes:
    """Return the body of a reply with a confidence in each choice; one that is no reply of this
    kind is returned unchanged.
    """
    try:
        reply = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(reply, dict) or not isinstance(reply.get("choices"), list):
        return content
    for position, choice in enumerate(reply["choices"]):
        if isinstance(choice, dict):
            index = index_of(choice, position)
            scored = await scoring.score(choice, index)
            _show(choice, scoring, scored)
            scoring.told(str(reply.get("id") or ""), index, scored)
    return compact(reply)


def _show(choice: dict[str, Any], scoring: Scoring, scored: Scored) -> None:
    """Change a choice into what the client gets."""
    asked = scoring.asked
    holder = choice
    name = "text"
    if asked.api == "chat":
        holder = choice.get("message")  # type: ignore[assignment]
        name = "content"
    if isinstance(holder, dict) and isinstance(holder.get(name), str):
        holder[name] = scoring.scorer.shown(holder[name], asked, scored)
    hide_logprobs(choice, asked)
    choice.update(scored.fields())


def index_of(choice: dict[str, Any], position: int) -> int:
    """Return the index of a choice, its position if it has none."""
    index = choice.get("index")
    return index if isinstance(index, int) else position


def compact(value: object) -> bytes:
    """Return JSON without spaces, in ASCII, which any text can be written in."""
    return json.dumps(value, separators=(",", ":")).encode()


def error_body(status: int, words: str) -> dict[str, Any]:
    """Return an error in the form of OpenAI's."""
    kind = "upstream_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": words, "type": kind, "param": None, "code": status}}
