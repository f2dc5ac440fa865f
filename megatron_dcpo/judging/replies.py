"""Read a response from a choice in the reply of an OpenAI-compatible server: its text, its
log-probs, and where its tokens end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_dcpo.judging.blocks import ends_of_tokens
from megatron_dcpo.judging.thinking import KNOWN
from megatron_dcpo.types import Response

# what reading a reply of another form raises
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
# that completions are asked for: to llama.cpp 0 of them is no log-prob at all
FEWEST_TOPS = 1
# servers write it for minus infinity, which JSON does not have
_LOWEST_LOGPROB = -9999.0
# how servers say that a response ended with an end token or at a stop text
_FINISHED = frozenset({"stop", "eos", "eos_token", "end_turn", "stop_sequence"})
# servers that compute in half precision report probabilities slightly above 1
_ROUNDED = 1e-3


class _Logged(NamedTuple):
    """What a server says of each token: its bytes, its log-prob, the largest ones in its place."""

    tokens: list[bytes]
    logprobs: list[Any]
    tops: list[list[Any]]


def response_of_choice(
    prompt_id: str, repeat: int, choice: Mapping[str, Any], api: str, tops: int = 0
) -> Response:
    """Return one sample from a server's reply, with the ``tops`` largest log-probs of each token if
    there are as many. Raises one of :data:`UNREADABLE` for a reply of another form.
    """
    text = _with_reasoning(choice["message"]) if api == "chat" else choice["text"] or ""
    if not isinstance(text, str):
        raise ValueError(f"a response that is not text but {type(text).__name__}")
    logged = _read_logprobs(choice.get("logprobs") or {})
    # Servers add the sampled token if it is not among the most probable ones.
    width = min(map(len, logged.tops), default=0)
    top_logprobs = None
    if tops and width and len(logged.tops) == len(logged.logprobs):
        largest = [sorted(row, reverse=True)[: min(tops, width)] for row in logged.tops]
        top_logprobs = _checked_logprobs(largest, 2)
    token_ends = None
    if len(logged.tokens) == len(logged.logprobs):
        text = _as_sampled(text, logged.tokens)
        token_ends = ends_of_tokens(list(map(len, logged.tokens)), text)
    finite = [_LOWEST_LOGPROB if value is None else value for value in logged.logprobs]
    return Response(
        prompt_id=prompt_id,
        sample_index=repeat,
        token_ids=np.empty(0, np.int64),
        logprobs=_checked_logprobs(finite, 1),
        finish_reason="stop" if is_finished(choice) else "length",
        weights_version=0,
        top_logprobs=top_logprobs,
        text=text,
        token_ends=token_ends,
    )


def is_finished(choice: Mapping[str, Any]) -> bool:
    """Return whether the model ended its response itself. Every reason that is not known to say so
    (``length``, ``max_tokens``, ``content_filter``, ``abort``, none at all) means that it did not:
    the last number may be cut.
    """
    reason = choice.get("finish_reason")
    return isinstance(reason, str) and reason.lower() in _FINISHED


def _with_reasoning(message: Mapping[str, Any]) -> object:
    """Return the text of a message. If the server's reasoning parser has removed the thinking, it
    is put back between the tags by which the judge knows it; without an answer, the thinking has
    not ended.
    """
    text = message.get("content") or ""
    thinking = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(thinking, str) or not isinstance(text, str):
        return text
    opening, end = (tag.decode() for tag in KNOWN[0])
    if text:
        return f"{opening}{thinking}{end}{text}"
    return f"{opening}{thinking}"


def _read_logprobs(logged: Mapping[str, Any]) -> _Logged:
    """Return the log-probs of a choice, in either form, whichever a server writes where: a row for
    each token, or lists.
    """
    rows = logged.get("content")
    if rows:
        return _Logged(
            tokens=[bytes(row.get("bytes") or _encoded(row.get("token", ""))) for row in rows],
            logprobs=[row["logprob"] for row in rows],
            tops=[[top["logprob"] for top in row.get("top_logprobs") or []] for row in rows],
        )
    return _Logged(
        tokens=[_encoded(token) for token in logged.get("tokens") or []],
        logprobs=logged.get("token_logprobs") or [],
        tops=[list((row or {}).values()) for row in logged.get("top_logprobs") or []],
    )


def _as_sampled(text: str, tokens: Sequence[bytes]) -> str:
    """Return the text that the tokens make up, of which an end token may be the last, if ``text``
    differs from it in white space alone, as where a reasoning parser has cut it. The tag that opens
    the thinking may be the prompt's.
    """
    same = {_without_space(text)}
    opening, end = (tag.decode() for tag in KNOWN[0])
    if end in text:
        same.add(_without_space(text).removeprefix(opening))
    for sampled in (b"".join(tokens), b"".join(tokens[:-1])):
        if tokens and _without_space(written := sampled.decode(errors="replace")) in same:
            return written
    return text


def _without_space(text: str) -> str:
    return "".join(text.split())


def _encoded(token: object) -> bytes:
    return str(token).encode(errors="replace")


def _checked_logprobs(values: Sequence[Any], dimensions: int) -> np.ndarray:
    """Return float32 [T] or [T, K], between the lowest that servers write and 0."""
    array = np.array(values, np.float32)
    if array.ndim != dimensions or not (array <= _ROUNDED).all():
        raise ValueError("a log-prob that is not a number of at most 0")
    return np.maximum(array, _LOWEST_LOGPROB)
