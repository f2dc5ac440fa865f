"""What a client asks, and what is asked of the upstream for it: the log-probs, or the ids of
tokens, that a confidence comes from. They are taken out again of whatever the upstream sends, in
any form.
"""

from __future__ import annotations

import re
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
IDS = ("token_ids", "prompt_token_ids")
_TURN = re.compile("[1-9][0-9]{0,5}")


@dataclass(frozen=True)
class Asked:
    """A request: the ``body`` of the client, and what is ``sent``.

    ``shows_logprobs`` says whether the client asked for log-probs itself, and ``shown_tops`` for
    how many of each token. ``adds_logprobs`` says whether ``sent`` asks for more than that, and
    ``adds_ids`` whether it asks for the ids of tokens, unlike the client. ``labels`` are the
    ``metadata`` of the request. ``turn`` is the number of the answer among the policy's in its
    conversation, None if it is not known. ``refusal`` is the reason why no confidence can be
    computed, known before the answer, "" if there is none.
    """

    api: Api
    body: Mapping[str, Any]
    sent: Mapping[str, Any]
    shows_logprobs: bool = False
    shown_tops: int = 0
    adds_logprobs: bool = False
    adds_ids: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    turn: int | None = None
    refusal: str = ""

    @property
    def adds(self) -> bool:
        """Return whether ``sent`` asks for what the client has to see nothing of."""
        return self.adds_logprobs or self.adds_ids

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

    def as_made(self, words: str) -> Asked:
        """Return the request as the client made it, whose answer has no confidence, because the
        upstream refuses in these words what was added.
        """
        missing = "no_logprobs" if self.adds_logprobs else "no_token_ids"
        refusal = f"{missing}: the upstream refuses them ({words})"
        return replace(self, sent=self.body, adds_logprobs=False, adds_ids=False, refusal=refusal)


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
    adds_ids = False
    tops = 0
    labels = _labels(body)
    turn = _turn(body, api, labels)
    if calibrator is not None:
        sent = calibrator.completed(body)
        different = calibrator.mismatch(sent, api, names)
        if different:
            refusal = f"mismatch: {different}"
            sent = dict(body)
        elif calibrator.is_of_turns:
            refusal = _why_not_asked(body, turn)
        wanted = calibrator.reads_logprobs and not refusal
        adds_ids = calibrator.is_of_turns and not refusal and not body.get("return_token_ids")
        tops = calibrator.top_logprobs
    if body.get("echo"):
        refusal = "echo: the text begins with the prompt"
        wanted = False
        adds_ids = False
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
    if adds_ids:
        sent["return_token_ids"] = True
    return Asked(
        api=api,
        body=body,
        sent=sent,
        shows_logprobs=shows,
        shown_tops=shown_tops,
        adds_logprobs=adds,
        adds_ids=adds_ids,
        labels=labels,
        turn=turn,
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


def _why_not_asked(body: Mapping[str, Any], turn: int | None) -> str:
    """Return why a number cannot be asked for, "" if it can."""
    if turn is None:
        return "no_turn: metadata.turn of the request does not say which one this is"
    contents = [message.get("content") for message in objects_in(body.get("messages"))]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if not all(isinstance(part, Mapping) and "text" in part for part in parts):
        return "no_token_ids: what is no text has none"
    return ""


def _turn(body: Mapping[str, Any], api: Api, labels: Mapping[str, str]) -> int | None:
    """Return the number of a turn that the metadata names, else one more than a chat has answers
    that have ended; None for other texts. Answers that the problem came with cannot be told from
    the policy's.
    """
    if "turn" in labels:
        return int(labels["turn"]) if _TURN.fullmatch(labels["turn"]) else None
    messages = body.get("messages")
    if api != "chat" or not isinstance(messages, list):
        return None
    roles = [one.get("role") for one in messages if isinstance(one, Mapping)]
    goes_on = bool(body.get("continue_final_message")) and roles[-1:] == ["assistant"]
    return roles.count("assistant") + (not goes_on)


def hide_added(value: Any, asked: Asked) -> None:  # noqa: ANN401 -- whatever JSON holds
    """Take from a reply, a chunk or a choice the log-probs and ids for which the client did not
    ask, wherever they stand.
    """
    if not asked.adds:
        return
    for one in objects_in(value):
        if asked.adds_ids:
            one.update({name: None for name in IDS if name in one})
        if not asked.adds_logprobs:
            continue
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
