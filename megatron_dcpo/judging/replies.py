"""Read a response from a choice in the reply of an OpenAI-compatible server: its text, its
log-probs, and where its tokens end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dcpo.judging.blocks import ends_of_tokens
from megatron_dcpo.judging.thinking import KNOWN
from megatron_dcpo.types import Response

# what reading a reply of another form raises
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
# servers write it for minus infinity, which JSON does not have
_LOWEST_LOGPROB = -9999.0
# how servers say that a response ended with an end token or at a stop text
_FINISHED = frozenset({"stop", "eos", "eos_token", "end_turn", "stop_sequence"})
# servers that compute in half precision report probabilities slightly above 1
_ROUNDED = 1e-3


def response_of_choice(
    prompt_id: str, repeat: int, choice: Mapping[str, Any], api: str
) -> Response:
    """Return one sample from a server's reply. Raises one of :data:`UNREADABLE` for a reply
    of another form.
    """
    logged = choice.get("logprobs") or {}
    lengths = []
    tops = []
    if api == "chat":
        text = _with_reasoning(choice["message"])
        rows = logged.get("content") or []
        logprobs = [row["logprob"] for row in rows]
        for row in rows:
            token = row.get("bytes") or str(row.get("token", "")).encode(errors="replace")
            lengths.append(len(token))
            tops.append([top["logprob"] for top in row.get("top_logprobs") or []])
    else:
        text = choice["text"] or ""
        logprobs = logged.get("token_logprobs") or []
        for token in logged.get("tokens") or []:
            lengths.append(len(str(token).encode(errors="replace")))
        for row in logged.get("top_logprobs") or []:
            tops.append(list((row or {}).values()))
    if not isinstance(text, str):
        raise ValueError(f"a response that is not text but {type(text).__name__}")
    # Servers add the sampled token if it is not among the most probable ones.
    width = min(map(len, tops), default=0)
    top_logprobs = None
    if width:
        largest = [sorted(row, reverse=True)[:width] for row in tops]
        top_logprobs = _checked_logprobs(largest, 2)
    token_ends = None
    if len(lengths) == len(logprobs):
        token_ends = ends_of_tokens(lengths, text)
    finite = [_LOWEST_LOGPROB if value is None else value for value in logprobs]
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


def _checked_logprobs(values: Sequence[Any], dimensions: int) -> np.ndarray:
    """Return float32 [T] or [T, K], between the lowest that servers write and 0."""
    array = np.array(values, np.float32)
    if array.ndim != dimensions or not (array <= _ROUNDED).all():
        raise ValueError("a log-prob that is not a number of at most 0")
    return np.maximum(array, _LOWEST_LOGPROB)
