"""What confidence is good for: answering only when sure. Accuracy-coverage curve, AURC; and two further binned errors.

Rows are taken from the most to the least confident. Rows of equal confidence cannot be told apart, so each counts as
the mean of its ties: the result does not hang on the order of the rows. Any score ranks, NaN rows (unparsed) are left
out, as in ``auroc``. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.calibration.metrics import DEFAULT_BINS, Confidences, Correct

COVERAGES = (0.5, 0.8, 0.9)


def accuracy_coverage(confidences: Confidences, correct: Correct) -> tuple[np.ndarray, np.ndarray]:
    """Coverage k/N and accuracy among the k most confident rows, both [N], k = 1 .. N."""
    hits = np.cumsum(_expected_hits(confidences, correct))
    k = np.arange(1, len(hits) + 1)
    return k / max(len(hits), 1), hits / k


def aurc(confidences: Confidences, correct: Correct) -> float:
    """Area under the risk-coverage curve: the mean over k of the error rate among the k most confident (Geifman 2017)."""
    _, accuracy = accuracy_coverage(confidences, correct)
    return float(np.mean(1.0 - accuracy)) if len(accuracy) else float("nan")


def accuracy_at_coverage(confidences: Confidences, correct: Correct, coverage: float) -> float:
    """Accuracy among the ceil(coverage * N) most confident rows; ``coverage`` in (0, 1]."""
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage must be in (0, 1], got {coverage}")
    _, accuracy = accuracy_coverage(confidences, correct)
    if not len(accuracy):
        return float("nan")
    return float(accuracy[int(np.ceil(round(coverage * len(accuracy), 9))) - 1])


def _expected_hits(confidences: Confidences, correct: Correct) -> np.ndarray:
    """Correctness [N] from the most confident row on, each replaced by the mean of its ties."""
    s, y = metrics.ranked_rows(confidences, correct)
    _, group, count = np.unique(-s, return_inverse=True, return_counts=True)
    mean = np.bincount(group, weights=y, minlength=len(count)) / np.maximum(count, 1)
    return np.repeat(mean, count)


def ece_adaptive(confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS) -> float:
    """Adaptive calibration error (Nixon 2019): the plain mean of the gaps of ``bins`` groups of equal size.

    The sorted rows are cut into groups whose sizes differ by at most one, ties by row order, so a crowded value may be
    cut, unlike in ``ece_equal_mass``. Fewer rows than bins: one group per row.
    """
    c, y = metrics.valid_rows(confidences, correct)
    if not len(c):
        return float("nan")
    order = np.argsort(c, kind="stable")
    groups = np.array_split(order, min(bins, len(c)))
    return float(np.mean([abs(c[g].astype(np.float64).mean() - y[g].mean()) for g in groups]))


def ece_debiased(confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS) -> float:
    """Debiased root-mean-square calibration error (Kumar 2019, equation of the debiased estimator).

    sqrt(max(0, sum_b n_b/N [(acc_b - conf_b)^2 - acc_b (1 - acc_b) / (n_b - 1)])). The plain ECE of a perfectly
    calibrated model is positive for every finite sample; this one is near zero. A bin of one row is not corrected.
    """
    rows = metrics.bin_rows(confidences, correct, bins)
    filled = rows.count > 0
    count = rows.count[filled]
    if not len(count):
        return float("nan")
    accuracy, gap = rows.accuracy[filled], rows.confidence[filled] - rows.accuracy[filled]
    variance = accuracy * (1.0 - accuracy) / np.maximum(count - 1, 1)
    return float(np.sqrt(max(0.0, ((count / count.sum()) * (gap**2 - variance)).sum())))


def selective_summary(confidences: Confidences, correct: Correct) -> dict[str, float]:
    """AURC and the accuracies at ``COVERAGES``."""
    at = {f"accuracy_at_{100 * c:.0f}": accuracy_at_coverage(confidences, correct, c) for c in COVERAGES}
    return {"aurc": aurc(confidences, correct), **at}


def coverage_to_json(confidences: Confidences, correct: Correct, points: int = 101) -> dict[str, Sequence[Any]]:
    """The curve thinned to at most ``points`` equally spaced coverages, for pictures."""
    coverage, accuracy = accuracy_coverage(confidences, correct)
    chosen = np.unique(np.linspace(0, len(coverage) - 1, min(points, len(coverage))).round().astype(int))
    return {"coverage": coverage[chosen].tolist(), "accuracy": accuracy[chosen].tolist()}
