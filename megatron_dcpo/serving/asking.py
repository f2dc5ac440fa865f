"""What a client asks, and what is asked of the upstream for it: the log-probs that a confidence is
computed from, which are taken out again of whatever the upstream sends, in any form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_dcpo.judging.replies import FEWEST_TOPS
from megatron_dcpo.serving.calibrator import Calibrator, Names
from megatron_dcpo.serving.json_text import objects_in, read_json

Api = Literal["chat", "completions"]
PATHS: Mapping[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
# what the names have in common under which servers keep log-probs: logprobs, cumulative_logprob,
# output_token_logprobs, completion_probabilities
_LOGGED = ("logprob", "probabilit")


@dataclass(frozen=True)
class Asked:
    """A request: the ``body`` of the client, and what is ``sent``.

    ``shows_logprobs`` says whether the client asked for log-probs itself, and ``shown_tops`` for
    how many of each token. ``adds_logprobs`` says whether ``sent`` asks for more than that.
    ``labels`` are the ``metadata`` of the request. ``refusal`` is the reason why no confidence
    can be computed, known before the answer, "" if there is none.
    """

    api: Api
    body: Mapping[str, Any]
    sent: Mapping[str, Any]
    shows_logprobs: bool = False
    shown_tops: int = 0
    adds_logprobs: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""

    @property
    def choices(self) -> int | None:
        """Return how many choices the answer has, None if the request does not say so clearly."""
        count = self.body.get("n")
        if count is None:
            count = 1
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            return None
        prompt = self.body.get("prompt")
        if self.api == "completions" and isinstance(prompt, list) and prompt:
            is_token_ids = isinstance(prompt[0], int)
            return count if is_token_ids else count * len(prompt)
        return count

    def without_logprobs(self, refusal: str) -> Asked:
        """Return the request as the client made it, whose answer has no confidence."""
        return replace(self, sent=self.body, adds_logprobs=False, refusal=refusal)


def read_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises ValueError, with one clear line, for anything
    else.
    """
    body = read_json(content)
    if not isinstance(body, dict):
        raise ValueError(f"it is of the type {type(body).__name__}")
    return body


def ask(body: Mapping[str, Any], api: Api, calibrator: Calibrator | None, names: Names) -> Asked:
    """Return what is asked of the upstream for the body of a client."""
    sent = dict(body)
    refusal = ""
    wanted = False
    tops = 0
    if calibrator is not None:
        sent = calibrator.completed(body)
        different = calibrator.mismatch(sent, api, names)
        if different:
            refusal = f"mismatch: {different}"
            sent = dict(body)
        wanted = calibrator.reads_logprobs and not refusal
        tops = calibrator.top_logprobs
    if body.get("echo"):
        refusal = "echo: the text begins with the prompt"
        wanted = False
    shows, shown_tops = _asked_logprobs(body, api)
    if api == "completions":
        tops = max(tops, FEWEST_TOPS)
    adds = wanted and (not shows or tops > shown_tops)
    most = max(tops, shown_tops)
    if adds and api == "chat":
        sent["logprobs"] = True
        if most:
            sent["top_logprobs"] = most
    elif adds:
        sent["logprobs"] = most
    return Asked(
        api=api,
        body=body,
        sent=sent,
        shows_logprobs=shows,
        shown_tops=shown_tops,
        adds_logprobs=adds,
        labels=_labels(body),
        refusal=refusal,
    )


def _asked_logprobs(body: Mapping[str, Any], api: Api) -> tuple[bool, int]:
    """Return whether a client asks for log-probs, and for how many of the largest ones."""
    requested = body.get("logprobs")
    if requested is None or requested is False:
        return False, 0
    tops = requested
    if api == "chat":
        tops = body.get("top_logprobs")
    if isinstance(tops, bool) or not isinstance(tops, int):
        tops = 0
    return True, max(tops, 0)


def _labels(body: Mapping[str, Any]) -> dict[str, str]:
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping):
        return {}
    return {key: str(value) for key, value in metadata.items()}


def hide_logprobs(value: Any, asked: Asked) -> None:  # noqa: ANN401 -- whatever JSON holds
    """Take from a reply, a chunk or a choice the log-probs for which the client did not ask,
    wherever they stand.
    """
    if not asked.adds_logprobs:
        return
    for one in objects_in(value):
        if asked.shows_logprobs:
            _cut_alternatives(one, asked.shown_tops)
        else:
            one.update({name: None for name in one if _is_logged(name)})


def _is_logged(name: str) -> bool:
    """Return whether log-probs stand under a name."""
    plain = name.lower().replace("_", "").replace("-", "")
    return any(part in plain for part in _LOGGED)


def _cut_alternatives(holder: dict[str, Any], count: int) -> None:
    """Leave the ``count`` largest log-probs of each token, in the row of one or in a list."""
    if "top_logprobs" not in holder:
        return
    found = holder["top_logprobs"]
    if not isinstance(found, list):
        holder["top_logprobs"] = None
    elif "logprob" in holder:
        holder["top_logprobs"] = found[:count]
    else:
        tokens = holder.get("tokens")
        if not isinstance(tokens, list):
            tokens = []
        rows = []
        for position, top in enumerate(found):
            sampled = tokens[position] if position < len(tokens) else None
            rows.append(_largest(top, count, sampled))
        holder["top_logprobs"] = rows or None


def _largest(top: object, count: int, sampled: object) -> object:
    """Return the ``count`` largest log-probs of a token, and that of the sampled one."""
    if not isinstance(top, dict):
        return None
    numbers = [token for token in top if isinstance(top[token], int | float)]
    ordered = sorted(numbers, key=lambda token: -top[token])
    kept = set(ordered[:count])
    return {token: value for token, value in top.items() if token in kept or token == sampled}
