"""A whole reply: the confidence of each of its choices, and the choices as the client gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dcpo.serving.asking import Asked, hide_added
from megatron_dcpo.serving.bounds import Bounds
from megatron_dcpo.serving.branch import TurnBranch
from megatron_dcpo.serving.json_text import compact, read_json
from megatron_dcpo.serving.scorer import Scored, Scorer, Stated

ERROR_WITH_ANSWER = "the upstream sent an error together with the answer"


class NotHiddenError(Exception):
    """In a reply of another form than OpenAI's the log-probs cannot be hidden."""


@dataclass(frozen=True)
class Scoring:
    """How the choices of one request are scored and shown; ``count`` gets every confidence, and
    ``branch`` asks for the number of a turn, None if nothing is asked for.
    """

    asked: Asked
    scorer: Scorer
    count: Callable[[Scored], None]
    bounds: Bounds = field(default_factory=Bounds)
    branch: TurnBranch | None = None

    def score(
        self, choice: Mapping[str, Any], unreadable: str, stated: Stated | None = None
    ) -> Scored:
        """Return the confidence of a choice; none if something of it was unreadable."""
        scored = self.scorer.score(self.asked, choice, unreadable, stated)
        self.count(scored)
        return scored


async def stated_in(content: bytes, scoring: Scoring) -> dict[int, Stated | None]:
    """Return what is stated behind the choices of a reply, by their places; nothing for a body that
    is no reply of this kind, and if nothing is asked for.
    """
    if scoring.branch is None:
        return {}
    try:
        reply = await asyncio.to_thread(read_json, content)
    except ValueError:
        return {}
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or reply.get("error"):
        return {}
    prompt_ids = reply.get("prompt_token_ids")
    asked = [place for place, choice in enumerate(choices) if isinstance(choice, dict)]
    stated = (scoring.branch.stated(choices[place], prompt_ids) for place in asked)
    return dict(zip(asked, await asyncio.gather(*stated), strict=True))


def scored_reply(
    content: bytes, scoring: Scoring, stated: Mapping[int, Stated | None] | None = None
) -> bytes:
    """Return the body of a reply with a confidence in each choice, some of which are ``stated``
    behind it; one that is no reply of this kind is returned as it is, without what the client did
    not ask for. Raises :class:`NotHiddenError`.
    """
    asked = scoring.asked
    try:
        reply = read_json(content)
    except ValueError:
        if asked.adds:
            raise NotHiddenError("the upstream's answer is not JSON") from None
        return content
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list):
        hide_added(reply, asked)
        return compact(reply) if asked.adds else content
    unreadable = ERROR_WITH_ANSWER if reply.get("error") else ""
    for place, choice in enumerate(choices):
        if isinstance(choice, dict):
            scored = scoring.score(choice, unreadable, (stated or {}).get(place))
            _show(choice, scoring, scored)
    hide_added(reply, asked)
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
