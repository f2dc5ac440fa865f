"""Whether a choice is a whole answer: what its ``finish_reason`` says, in the words of the servers
that are known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megatron_dcpo.judging.replies import is_finished

# what servers write into chunks that are not the last one
_NO_REASON = ("", "null", "none", "false")
# the model would have gone on; FitRecord.finish_reasons knows them as "length"
_CUT = ("length", "max_tokens", "max_length")
_FILTERED = ("content_filter", "content-filter", "safety")
_TOOLS = ("tool_calls", "function_call", "tool_use")


def finish_reason(choice: Mapping[str, Any]) -> object:
    """Return why a choice ended, None if it did not say that it has."""
    reason = choice.get("finish_reason")
    if reason is None or reason is False:
        return None
    if isinstance(reason, str) and reason.strip().lower() in _NO_REASON:
        return None
    return reason


def _word(choice: Mapping[str, Any]) -> str:
    """Return why a choice ended in small letters, "" if that is no word."""
    reason = finish_reason(choice)
    return reason.strip().lower() if isinstance(reason, str) else ""


def calls_tool(message: object) -> bool:
    """Return whether a message, or the delta of one, calls a tool."""
    if not isinstance(message, Mapping):
        return False
    return bool(message.get("tool_calls") or message.get("function_call"))


def why_not_whole(choice: Mapping[str, Any], fitted: Collection[str] = ()) -> str:
    """Return why the text of a choice is no whole answer, "" if it is one. ``fitted`` are the
    finish reasons of the answers on which the predictor was fitted.
    """
    if _word(choice) in _TOOLS or calls_tool(choice.get("message")):
        return "tool_call: the answer calls a tool"
    return why_cut(choice, fitted)


def ends_with_token(choice: Mapping[str, Any]) -> bool:
    """Return whether the last token of a choice is one that ends it: it was neither cut nor stopped
    at a text, which ``stop_reason`` names.
    """
    word = _word(choice)
    return word not in _CUT and not isinstance(choice.get("stop_reason"), str)


def why_cut(choice: Mapping[str, Any], fitted: Collection[str] = ()) -> str:
    """Return why a choice, which may call a tool, has not ended as the ``fitted`` ones, "" if it
    has.
    """
    reason = finish_reason(choice)
    word = _word(choice)
    if reason is None:
        return "unfinished: the upstream does not say that the answer has ended"
    if is_finished(choice) or word in _TOOLS:
        return ""
    if word in _FILTERED:
        return "filtered: the upstream's filter has cut the answer"
    if word not in _CUT:
        return f"unfinished: the finish_reason {reason!r:.100} is not known"
    if "length" in fitted:
        return ""
    return "truncated: the answer was cut off"
