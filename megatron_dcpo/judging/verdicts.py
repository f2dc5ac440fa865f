"""Turn what users' verifiers and agents return into outcomes, and bound the share of
responses that are not judged.

A verifier, a server or a session that fails gives no outcome: nothing is known of the response, so
that it is left out and counted, and is neither right nor wrong.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_dcpo.codec import LARGEST
from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.judging.answers import Attempt, Outcome, Verifier
from megatron_dcpo.runtime.text import printable

logger = logging.getLogger(__name__)

OPTION = "judging.verifier"
# limits of the values that a function may add to the record of a response
LOGGED_KEYS = 32
LOGGED_CHARACTERS = 200
_SHOWN_BITS = 4096  # of an integer; Python writes no more than 4300 digits


class TooManyUnjudged(UserError):
    """Too many responses of a step or a benchmark have no judgement."""


def warn_once(name: str) -> Callable[[str], None]:
    """Return a function that logs the first error of the verifier ``name``."""
    said: list[str] = []

    def warn(why: str) -> None:
        if not said:
            said.append(why)
            logger.warning(
                "%s=%s: %s; the response is not judged and left out; further errors are only "
                "counted",
                OPTION,
                name,
                printable(one_line(why, 300)),
            )

    return warn


def outcome_of(
    result: object, options: JudgingConfig, warn: Callable[[str], None]
) -> Outcome | None:
    """Return the outcome for the result from a worker or a server, None if it is an error."""
    logged: dict[str, Any] = {}
    if isinstance(result, Mapping) and "error" in result and "score" not in result:
        why: str | None = str(result["error"])
    else:
        why, logged = checked_result(result)
    if why is not None:
        warn(why)
        return None
    score = logged["score"]
    return Outcome(
        correct=score >= options.threshold,
        category=None,
        score=score if options.graded else None,
        logged=logged,
    )


def checked_result(result: object) -> tuple[str | None, dict[str, Any]]:
    """Return what is wrong with a result, None if nothing is, and the result as a mapping with a
    finite ``score``.

    An entry ``error`` beside a score that can be used is logged like any other. Entries without a
    value are left out.
    """
    values = dict(result) if isinstance(result, Mapping) else {"score": result}
    score: Any = values.get("score")
    if hasattr(score, "item"):  # a scalar of NumPy or torch
        score = score.item()
    is_number = isinstance(score, bool | int | float)
    if not is_number or not 0 <= score <= 1:  # no comparison holds for NaN
        why = (
            f"returned {result!r:.80}; expected a bool, a number in [0, 1], or a mapping with "
            "such a score"
        )
        if values.get("error") is not None:
            why = str(values["error"])
        return why, {}
    checked: dict[str, Any] = {"score": float(score)}
    for key, value in list(values.items())[: LOGGED_KEYS + 1]:
        if key != "score" and value is not None:
            checked[printable(key)[:LOGGED_CHARACTERS]] = _plain(value)
    return None, checked


def _plain(value: Any) -> bool | int | float | str:  # noqa: ANN401 -- of NumPy or torch
    """Return a value that JSON and the metrics can hold: a number that can be computed with, or a
    printable text that is not too long.
    """
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if isinstance(value, int | float) and abs(value) < LARGEST:  # not so for NaN
        return value
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    return printable(value, lines=True)[:LOGGED_CHARACTERS]


def lost(why: str) -> dict[str, str]:
    """Return the result for a response whose worker gave none."""
    return {"error": why}


def check_unjudged(unjudged: int, responses: int, largest: float, what: str) -> None:
    """Raise :class:`TooManyUnjudged` if more than the share ``largest`` of ``responses`` have no
    judgement, or all of them.
    """
    allowed = min(math.floor(largest * responses + 1e-9), responses - 1)
    if responses and unjudged > allowed:
        raise TooManyUnjudged(
            f"{unjudged} of {responses} responses ({what}) have no judgement, more than "
            f"judging.max_error_rate={largest:g}; the warning above says why"
        )


def with_verdicts(verifier: Verifier, options: JudgingConfig) -> Verifier:
    """Return a verifier that takes the verdict of an agent where there is one,
    by ``judging.threshold`` and ``judging.graded``, and asks ``verifier`` where there is none.
    """

    def judged(attempts: Sequence[Attempt]) -> Sequence[Outcome | None]:
        others = iter(verifier([one for one in attempts if one.verdict is None]))
        return [
            next(others)
            if one.verdict is None
            else outcome_of(one.verdict, options, logger.warning)
            for one in attempts
        ]

    return judged
