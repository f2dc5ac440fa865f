"""Is the boxed answer right? The last complete ``\\boxed{...}`` against the key, by math-verify.

As OpenCompass' evaluator uses math-verify: LaTeX extraction with the box first, first match, nothing without an
anchor (algorithms 4.1). Two differences: only the brace-matched box is read, never the prose around it, and the key
is ``verify``'s first argument, as the library documents it.
"""

from __future__ import annotations

import logging
import re
import threading
from functools import lru_cache
from typing import Any

from megatron_dcpo.judging.boxes import last_box

TIMEOUT_SECONDS = 5
MAX_ANSWER = 1_000  # characters; no key is near it, and sympy's time grows with what it is fed

_INTEGER = re.compile(r"[+-]?[0-9]+")
_IN_MATH = re.compile(r"(?<!\\)\$")  # the key brings its own delimiters; \$ is money

for _name in ("math_verify", "math_verify.parser", "math_verify.grader", "math_verify.utils"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)  # it reports each timeout and each thread without one


def verify_math(response_text: str, ground_truth: str) -> bool:
    """Whether the last complete box of ``response_text`` equals ``ground_truth``. No box is a wrong answer.

    The text must end before the confidence line, which is never an answer. Nothing raises: what cannot be parsed, or
    not in time, is wrong. In the main thread math-verify's alarm bounds the time; other threads have no alarm.
    """
    answer = extract_boxed(response_text)
    if answer is None:
        return False
    answer, key = answer.strip(), ground_truth.strip()
    if answer == key:
        return bool(key)
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(key):
        return _canonical_integer(answer) == _canonical_integer(key)  # AIME keys are written 025
    if not answer or not key or len(answer) > MAX_ANSWER:
        return False
    return _equivalent(answer, key)


def extract_boxed(text: str) -> str | None:
    """Content of the complete box that opens last, None when there is none."""
    content = text.encode(errors="surrogatepass")
    box = last_box(content)
    return content[box.inner : box.end - 1].decode(errors="replace") if box else None


def _canonical_integer(text: str) -> str:
    digits = text.lstrip("+-").lstrip("0") or "0"
    return "-" + digits if text.startswith("-") and digits != "0" else digits


def _equivalent(answer: str, key: str) -> bool:
    try:
        from math_verify import verify

        gold = _parse_key(key, _timeout())
        predicted = _parse(f"\\boxed{{{answer}}}", _timeout(), box_first=True)
        return bool(predicted and verify(gold, predicted, timeout_seconds=_timeout()))
    except Exception:  # sympy and the LaTeX grammar raise nearly anything on sampled text
        return False


@lru_cache(maxsize=4096)
def _parse_key(key: str, timeout: int | None) -> list[Any]:
    """A key is judged against G responses, and parsed once. Raises ValueError, which the cache does not keep."""
    parsed = _parse(key if _IN_MATH.search(key) else f"${key}$", timeout, box_first=False)
    if not parsed:
        raise ValueError(f"cannot parse the key {key!r}")
    return parsed


def _parse(text: str, timeout: int | None, *, box_first: bool) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=0 if box_first else 50, try_extract_without_anchor=not box_first)
    expression = () if box_first else (ExprExtractionConfig(),)
    parsed: list[Any] = parse(
        text, extraction_config=[latex, *expression], extraction_mode="first_match", parsing_timeout=timeout
    )
    return parsed


def _timeout() -> int | None:
    return TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None
