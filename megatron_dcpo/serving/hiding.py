"""The log-probs that the proxy asked for and the client did not: they are taken out of whatever the
upstream sends, in any form.
"""

from __future__ import annotations

from typing import Any

from megatron_dcpo.serving.asking import Asked, list_of

# what the names have in common under which servers keep log-probs: logprobs, cumulative_logprob,
# output_token_logprobs, completion_probabilities
_LOGGED = ("logprob", "probabilit")


def hide_logprobs(value: Any, asked: Asked) -> None:  # noqa: ANN401 -- whatever JSON holds
    """Take from a reply, a chunk or a choice the log-probs for which the client did not ask,
    wherever they stand.
    """
    if not asked.adds_logprobs:
        return
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, list):
            todo += one
        elif isinstance(one, dict):
            if asked.shows_logprobs:
                _cut_alternatives(one, asked)
            else:
                one.update({name: None for name in one if _is_logged(name)})
            todo += one.values()


def _is_logged(name: str) -> bool:
    """Return whether log-probs stand under a name."""
    plain = name.lower().replace("_", "").replace("-", "")
    return any(part in plain for part in _LOGGED)


def _cut_alternatives(holder: dict[str, Any], asked: Asked) -> None:
    """Leave as many of the largest log-probs of each token as the client asked for."""
    if "top_logprobs" not in holder:
        return
    found = holder["top_logprobs"]
    if not isinstance(found, list):
        holder["top_logprobs"] = None
    elif asked.api == "chat":
        holder["top_logprobs"] = found[: asked.shown_tops]
    else:
        tokens = list_of(holder, "tokens")
        rows = []
        for position, top in enumerate(found):
            sampled = tokens[position] if position < len(tokens) else None
            rows.append(_largest(top, asked.shown_tops, sampled))
        holder["top_logprobs"] = rows or None


def _largest(top: object, count: int, sampled: object) -> object:
    """Return the ``count`` largest log-probs of a token, and that of the sampled one."""
    if not isinstance(top, dict):
        return None
    numbers = [token for token in top if isinstance(top[token], int | float)]
    ordered = sorted(numbers, key=lambda token: -top[token])
    kept = set(ordered[:count])
    return {token: value for token, value in top.items() if token in kept or token == sampled}
