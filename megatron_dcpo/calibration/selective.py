"""Answering only when certain: accuracy among the most confident rows, and the area under the
risk-coverage curve. NumPy only.

Rows are taken from the most to the least confident. Rows of equal confidence cannot be told apart,
so each counts as the mean of its ties, and the result does not depend on the order of the rows. Any
score ranks; NaN rows (unparsed) are left out, as in ``auroc``. SciPy's quantile of Student's t is
imported where rows share problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dcpo.calibration.metrics import (
    NORMAL_975,
    Confidences,
    Correct,
    as_confidences,
    ranked_rows,
    wilson_interval,
)

COVERAGES = (0.5, 0.8, 0.9)


def accuracy_coverage(confidences: Confidences, correct: Correct) -> tuple[np.ndarray, np.ndarray]:
    """Return coverage k/N and accuracy among the k most confident rows, both [N], k = 1 .. N."""
    hits = np.cumsum(_expected_hits(confidences, correct))
    k = np.arange(1, len(hits) + 1)
    return k / max(len(hits), 1), hits / k


def aurc(confidences: Confidences, correct: Correct) -> float:
    """Return the area under the risk-coverage curve: the mean over k of the error rate among the k
    most confident (Geifman 2017).
    """
    _, accuracy = accuracy_coverage(confidences, correct)
    if len(accuracy):
        return float(np.mean(1.0 - accuracy))
    return float("nan")


def accuracy_at_coverage(confidences: Confidences, correct: Correct, coverage: float) -> float:
    """Return the accuracy among the ceil(coverage * N) most confident rows, for a ``coverage`` in
    (0, 1].
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage must be in (0, 1], got {coverage}")
    _, accuracy = accuracy_coverage(confidences, correct)
    if not len(accuracy):
        return float("nan")
    count = int(np.ceil(round(coverage * len(accuracy), 9)))
    return float(accuracy[count - 1])


@dataclass(frozen=True)
class Threshold:
    """The least ``confidence`` that is answered. Of the N rows by which it was chosen the share
    ``coverage`` is answered, and of those the share ``risk`` is wrong; ``low`` and ``high`` are the
    ends of its 95 % interval (:func:`share_interval`).
    """

    confidence: float
    coverage: float
    risk: float
    low: float
    high: float


def threshold_for_risk(
    confidences: Confidences,
    correct: Correct,
    risk: float,
    problems: Sequence[int] | np.ndarray | None = None,
) -> Threshold | None:
    """Return the threshold that answers most while at most the share ``risk`` of the answers is
    wrong; None if no threshold does. ``problems`` [N] has the problem of each row; without it each
    row is its own.
    """
    s, y = ranked_rows(confidences, correct)
    order = np.argsort(-s, kind="stable")
    s = s[order]
    is_wrong = 1.0 - y[order]
    wrong = np.cumsum(is_wrong)
    answered = np.arange(1, len(s) + 1)
    # a threshold answers all rows of one confidence, or none
    is_last = np.append(s[1:] != s[:-1], True) if len(s) else np.zeros(0, bool)
    kept = np.flatnonzero(is_last & (wrong / answered <= risk))
    if not len(kept):
        return None
    k = int(kept[-1])
    names = np.arange(len(s))
    if problems is not None:
        names = np.asarray(problems)[~np.isnan(as_confidences(confidences))]
    low, high = share_interval(is_wrong[: k + 1], names[order][: k + 1])
    return Threshold(
        confidence=float(s[k]),
        coverage=float(answered[k] / len(s)),
        risk=float(wrong[k] / answered[k]),
        low=low,
        high=high,
    )


def share_interval(marked: np.ndarray, problems: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the share of rows that are ``marked`` (0 or 1) [N], over
    ``problems`` [N]: Wilson's where each row has a problem of its own.

    The rows of one problem may be alike. Where some share a problem, the interval is Wilson's for
    as many independent rows as would leave the share the variance that it has between the problems
    (linearized, as of a ratio of two sums), with Student's t for their number. All or none marked
    shows no variance: each problem then counts as one row. One problem alone says nothing.
    """
    _, of_row = np.unique(problems, return_inverse=True)
    rows = np.bincount(of_row)
    count = len(rows)
    if count == len(marked):
        return _ends(marked.sum(), count)
    if count == 1:
        return 0.0, 1.0
    from scipy.special import stdtrit

    share = float(marked.mean())
    independent = float(count)
    if 0.0 < share < 1.0:
        residuals = np.bincount(of_row, weights=marked) - share * rows
        variance = count / (count - 1) * float(residuals @ residuals) / len(marked) ** 2
        independent = len(marked)
        if variance > 0:
            independent = min(share * (1.0 - share) / variance, len(marked))
    return _ends(share * independent, independent, z=float(stdtrit(count - 1, 0.975)))


def _ends(marked: float, count: float, z: float = NORMAL_975) -> tuple[float, float]:
    low, high = wilson_interval(np.array([marked]), np.array([count]), z)
    return float(low[0]), float(high[0])


def _expected_hits(confidences: Confidences, correct: Correct) -> np.ndarray:
    """Return the correctness [N] from the most confident row on, each replaced by the mean of its
    ties.
    """
    s, y = ranked_rows(confidences, correct)
    _, group, count = np.unique(-s, return_inverse=True, return_counts=True)
    mean = np.bincount(group, weights=y, minlength=len(count)) / np.maximum(count, 1)
    return np.repeat(mean, count)


def selective_summary(confidences: Confidences, correct: Correct) -> dict[str, float]:
    """Return AURC and the accuracies at ``COVERAGES``."""
    summary = {"aurc": aurc(confidences, correct)}
    for coverage in COVERAGES:
        name = f"accuracy_at_{100 * coverage:.0f}"
        summary[name] = accuracy_at_coverage(confidences, correct, coverage)
    return summary


def abstention_rates(correct: Correct, abstained: Sequence[bool]) -> dict[str, float]:
    """Return the rates of rows of which some are not answered: ``rate``, the share of abstentions;
    ``coverage``, the share of answers; ``selective_accuracy`` of the answers; and
    ``hallucination_rate``, the share of all rows with a wrong answer (TruthRL).
    """
    y = np.asarray(correct, float)
    silent = np.asarray(abstained, bool)
    answered = y[~silent]
    accuracy = float("nan")
    if len(answered):
        accuracy = float(np.mean(answered))
    return {
        "rate": float(np.mean(silent)),
        "coverage": float(np.mean(~silent)),
        "selective_accuracy": accuracy,
        "hallucination_rate": float(np.sum(1 - answered)) / len(y),
    }


def coverage_to_json(
    confidences: Confidences, correct: Correct, points: int = 101
) -> dict[str, Sequence[Any]]:
    """Return the curve for pictures, thinned to at most ``points`` equally spaced coverages."""
    coverage, accuracy = accuracy_coverage(confidences, correct)
    spaced = np.linspace(0, len(coverage) - 1, min(points, len(coverage)))
    chosen = np.unique(spaced.round().astype(int))
    return {"coverage": coverage[chosen].tolist(), "accuracy": accuracy[chosen].tolist()}
