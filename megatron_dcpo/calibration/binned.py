"""Intervals of the binned errors. The plug-in ECE of a finite sample is too large; the resamples of
the percentile bootstrap are larger still, so that its interval does not even contain the true value
of a calibrated model.

With x_b = n_b / N (conf_b - acc_b), ECE = sum |x_b| and PCE = sum max(x_b, 0). x_b is about normal
around its true value m, with the standard deviation s_b of a bootstrap over problems, so that E
max(x_b, 0) = h(m, s_b) with h(m, s) = m Phi(m/s) + s phi(m/s). The corrected values are 2 max(x, 0)
- h(x, s) for max(x, 0), and |x| = 2 max(x, 0) - x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.calibration.metrics import DEFAULT_BINS, Confidences, Correct

_PHI = np.vectorize(lambda z: 0.5 * math.erfc(-z * math.sqrt(0.5)), otypes=[float])


class BinnedError(NamedTuple):
    """The corrected estimate, in [0, 1], and the ends of its interval."""

    estimate: float
    low: float
    high: float


def binned_error(
    confidences: Confidences,
    correct: Correct,
    problem_ids: Sequence[Any] | np.ndarray | None = None,
    bins: int = DEFAULT_BINS,
    resamples: int = 1000,
    seed: int = 0,
    over_only: bool = False,
) -> BinnedError:
    """Return ECE (PCE with ``over_only``) corrected for its bias, with a 95 % interval from
    resampling whole problems. Without a valid row it is NaN; so are the ends of the interval if the
    resamples do not differ, as of one problem alone.

    The interval is estimate ± 1.96 standard deviations of the corrected estimate, cut at 0. It
    begins at 0 if the plug-in error is not above that of 97.5 % of calibrated models with the same
    noise. Simulated coverage: 92 to 97 % (tests/unit/calibration/test_binned.py).
    """
    c = metrics.as_confidences(confidences)
    valid = np.flatnonzero(metrics.is_valid(c))
    y = metrics.as_correct(correct)[valid]
    c = c[valid]
    if not len(c):
        return BinnedError(math.nan, math.nan, math.nan)
    ids = valid if problem_ids is None else np.asarray(problem_ids)[valid]
    _, problem = np.unique(ids, return_inverse=True)
    rows = metrics.bin_rows(c, y, bins)
    excess = np.zeros((problem.max() + 1, bins))
    count = np.bincount(problem)
    index = np.searchsorted(rows.edges[1:].astype(c.dtype), c, side="left")
    np.add.at(excess, (problem, index), c.astype(np.float64) - y)
    excess = excess[:, rows.count > 0]
    x = excess.sum(axis=0) / len(c)
    generator = np.random.default_rng(seed)
    drawn = np.empty((resamples, len(x)))
    for i in range(resamples):
        problems = generator.integers(len(count), size=len(count))
        times = np.bincount(problems, minlength=len(count))
        drawn[i] = times @ excess / (times @ count)
    deviation = drawn.std(axis=0)
    estimate = float(_corrected(x, deviation, over_only).sum())
    if deviation.max() <= metrics.NO_SPREAD:
        return BinnedError(max(estimate, 0.0), math.nan, math.nan)
    corrected = _corrected(drawn, deviation, over_only).sum(axis=1)
    half = metrics.NORMAL_975 * float(corrected.std())
    calibrated = np.quantile(_plain(drawn - x, over_only).sum(axis=1), 0.975)
    if _plain(x, over_only).sum() <= calibrated:
        low = 0.0
    else:
        low = estimate - half
    return BinnedError(max(estimate, 0.0), max(low, 0.0), max(estimate + half, 0.0))


def null_ece(
    confidences: Confidences, bins: int = DEFAULT_BINS, resamples: int = 1000, seed: int = 0
) -> float:
    """Return the value below which the plug-in ECE of a perfectly calibrated model with these
    confidences stays in 95 % of all cases.

    Its labels are y ~ Bernoulli(c), independent of each other. Repeats of a problem share whatever
    c leaves open and have a wider band, so this one is strict.
    """
    c = metrics.as_confidences(confidences)
    c = c[metrics.is_valid(c)].astype(np.float64)
    if not len(c):
        return math.nan
    generator = np.random.default_rng(seed)
    values = [metrics.ece(c, generator.random(len(c)) < c, bins) for _ in range(resamples)]
    return float(np.quantile(values, 0.95))


def _plain(x: np.ndarray, over_only: bool) -> np.ndarray:
    return np.maximum(x, 0.0) if over_only else np.abs(x)


def _corrected(x: np.ndarray, deviation: np.ndarray, over_only: bool) -> np.ndarray:
    """Return max(x, 0) or |x| less its estimated bias."""
    s = np.maximum(deviation, 1e-15)
    h = x * _PHI(x / s) + s * np.exp(-0.5 * np.square(x / s)) / math.sqrt(2 * math.pi)
    over = 2 * np.maximum(x, 0.0) - h
    return over if over_only else 2 * over - x
