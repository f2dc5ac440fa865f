"""The strict parser of the stated confidence: ``<conf> Confidence: 0.83`` at the very end of a
finished response.

There must be exactly one marker, after the last ``\\boxed`` (or the last fenced program). The word
``Confidence:`` is optional and case-insensitive. One plain decimal in [0, 1] must follow, and only
white space after it. Everything else is malformed, each kind under its own name
(docs/algorithms.md#1-judging-from-sampled-ids-to-r-c-boundary). Linear in the length of the text;
no input raises.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_dcpo.codec import LARGEST
from megatron_dcpo.judging.thinking import ThinkingTags, split_reasoning
from megatron_dcpo.types import CONFIDENCE_TAG, ConfidenceStatus

CONFIDENCE_TOKENS = 16  # for the number that a policy states when it is asked
_SPACE = r"[ \t\r\n\f\v]*"
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
# ASCII classes on purpose: \d and \s also match digits and spaces of other scripts.
_LINE = re.compile(
    rf"{_SPACE}(?:[Cc][Oo][Nn][Ff][Ii][Dd][Ee][Nn][Cc][Ee]{_SPACE}:{_SPACE})?(-?{_DECIMAL})"
)
_BLANK = re.compile(_SPACE)


@dataclass(frozen=True)
class ParsedConfidence:
    """The result of parsing: ``confidence`` is in [0, 1] if ``status`` is ``ok`` and None
    otherwise; ``stated`` is the number outside [0, 1] that was stated, if it can be computed with
    (:data:`megatron_dcpo.codec.LARGEST`).
    """

    confidence: float | None
    status: ConfidenceStatus
    stated: float | None = None


def parse_confidence(
    text: str, *, marker: str = CONFIDENCE_TAG, finished: bool, opener: str = "\\boxed"
) -> ParsedConfidence:
    """Read the confidence of a response, or why there is none.

    Args:
        text: the response without its EOS; bytes that are not UTF-8 may have been decoded with
            ``errors="replace"``.
        finished: whether the model ended the response itself. An unfinished one is ``truncated``
            whatever it holds, because its number may be cut (``0.8`` of ``0.83``).
        opener: the text that begins an answer. One after the marker makes the response
            ``before_box``; with "" none does.

    The kinds are tried in the order truncated, missing, multiple, before_box, unparsable,
    trailing_text, out_of_range; the first that applies is the status. A negative number is out of
    range, even ``-0``.
    """
    if not finished:
        return ParsedConfidence(None, "truncated")
    _, tag, tail = text.partition(marker)
    if not tag:
        return ParsedConfidence(None, "missing")
    if marker in tail:
        return ParsedConfidence(None, "multiple")
    if opener and opener in tail:
        return ParsedConfidence(None, "before_box")
    number = _LINE.match(tail)
    if number is None:
        return ParsedConfidence(None, "unparsable")
    if _BLANK.fullmatch(tail, number.end()) is None:
        return ParsedConfidence(None, "trailing_text")
    value = float(number[1])
    if number[1].startswith("-") or value > 1:
        stated = value if abs(value) < LARGEST else None
        return ParsedConfidence(None, "out_of_range", stated)
    return ParsedConfidence(value, "ok")


def confidence_line(
    text: str, tags: ThinkingTags | None, prompt_end: bytes, marker: str
) -> str | None:
    """Return what is written behind the ``text`` of a policy so that it goes on with a confidence.
    None if it states one, or if it has no answer: nothing behind the thinking, which may have begun
    at the ``prompt_end``.
    """
    _, answer = split_reasoning(text, tags, prompt_end)
    if not answer or marker in answer:
        return None
    line = f"{marker} Confidence:"
    return line if text.endswith("\n") else f"\n{line}"


def parse_number(text: str, marker: str, finished: bool) -> ParsedConfidence:
    """Read what a policy has written behind a :func:`confidence_line`."""
    return parse_confidence(f"{marker}{text}", marker=marker, finished=finished)
