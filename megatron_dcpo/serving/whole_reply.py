"""A whole reply: the confidence of each of its choices, and the choices as the client gets them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dcpo.serving.asking import Asked, hide_logprobs
from megatron_dcpo.serving.bounds import Bounds
from megatron_dcpo.serving.json_text import compact, read_json
from megatron_dcpo.serving.scorer import Scored, Scorer

ERROR_WITH_ANSWER = "the upstream sent an error together with the answer"


class NotHiddenError(Exception):
    """In a reply of another form than OpenAI's the log-probs cannot be hidden."""


@dataclass(frozen=True)
class Scoring:
    """How the choices of one request are scored and shown; ``count`` gets every confidence."""

    asked: Asked
    scorer: Scorer
    count: Callable[[Scored], None]
    bounds: Bounds = field(default_factory=Bounds)

    def score(self, choice: Mapping[str, Any], unreadable: str) -> Scored:
        """Return the confidence of a choice; none if something of it was unreadable."""
        scored = self.scorer.score(self.asked, choice, unreadable)
        self.count(scored)
        return scored


def scored_reply(content: bytes, scoring: Scoring) -> bytes:
    """Return the body of a reply with a confidence in each choice; one that is no reply of this
    kind is returned as it is, without log-probs that the client did not ask for. Raises
    :class:`NotHiddenError`.
    """
    asked = scoring.asked
    try:
        reply = read_json(content)
    except ValueError:
        if asked.adds_logprobs:
            raise NotHiddenError("the upstream's answer is not JSON") from None
        return content
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list):
        hide_logprobs(reply, asked)
        return compact(reply) if asked.adds_logprobs else content
    unreadable = ERROR_WITH_ANSWER if reply.get("error") else ""
    for choice in choices:
        if isinstance(choice, dict):
            scored = scoring.score(choice, unreadable)
            _show(choice, scoring, scored)
    hide_logprobs(reply, asked)
    return compact(reply)


def _show(choice: dict[str, Any], scoring: Scoring, scored: Scored) -> None:
    """Change a choice into what the client gets."""
    holder = choice
    name = "text"
    if scoring.asked.api == "chat":
        holder = choice.get("message") or {}
        name = "content"
    if isinstance(holder, dict) and isinstance(holder.get(name), str):
        holder[name] = scoring.scorer.shown(holder[name], scoring.asked, scored)
    choice.update(scored.fields())
