"""What a client asks, and what is asked of the upstream for it: the log-probs that a confidence is
computed from, which the answer to the client does not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megatron_dcpo.serving import exact_json
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
    body = exact_json.loads(content)
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


def list_of(values: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list under a name, an empty one if there is none."""
    found = values.get(name)
    return found if isinstance(found, list) else []
