"""What a client asks, and what is asked of the upstream for it: the log-probs that a confidence is
computed from, which the answer to the client does not show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_dcpo.serving.calibrator import Calibrator, Names

Api = Literal["chat", "completions"]
PATHS: Mapping[str, Api] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}


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

    def without_logprobs(self, refusal: str) -> Asked:
        """Return the request as the client made it, whose answer has no confidence."""
        return replace(self, sent=self.body, adds_logprobs=False, refusal=refusal)


def read_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a body. Raises ValueError, with one clear line, for anything
    else.
    """
    try:
        body = json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
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
    adds = wanted and (not shows or tops > shown_tops)
    if adds and api == "chat":
        sent["logprobs"] = True
        if max(tops, shown_tops):
            sent["top_logprobs"] = max(tops, shown_tops)
    elif adds:
        sent["logprobs"] = max(tops, shown_tops)
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


def hide_logprobs(choice: dict[str, Any], asked: Asked) -> None:
    """Take from a choice the log-probs for which the client did not ask."""
    if not asked.adds_logprobs or "logprobs" not in choice:
        return
    logged = choice["logprobs"]
    if not asked.shows_logprobs:
        choice["logprobs"] = None
        return
    if not isinstance(logged, dict):
        return
    if asked.api == "chat":
        for row in list_of(logged, "content"):
            if isinstance(row, dict) and list_of(row, "top_logprobs"):
                row["top_logprobs"] = row["top_logprobs"][: asked.shown_tops]
        return
    rows = []
    tokens = list_of(logged, "tokens")
    for position, top in enumerate(list_of(logged, "top_logprobs")):
        sampled = tokens[position] if position < len(tokens) else None
        rows.append(_largest(top, asked.shown_tops, sampled))
    logged["top_logprobs"] = rows or None


def list_of(values: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list under a name, an empty one if there is none."""
    found = values.get(name)
    return found if isinstance(found, list) else []


def _largest(top: object, count: int, sampled: object) -> object:
    """Return the ``count`` largest log-probs of a token, and that of the sampled one."""
    if not isinstance(top, dict):
        return top
    numbers = [token for token in top if isinstance(top[token], int | float)]
    ordered = sorted(numbers, key=lambda token: -top[token])
    kept = set(ordered[:count])
    return {token: value for token, value in top.items() if token in kept or token == sampled}
