"""Is a model as right as it says it is? Calibration metrics over (confidence, correct) pairs. NumPy
only.

Every function takes ``confidences`` [N] and ``correct`` [N] (0/1 or bool). A confidence is *valid*
if it lies in [0, 1]; ``None``, NaN, infinities and numbers outside (a model that says 85, or the
reference code's sentinels -0.1 and -0.2 for "not found") are *invalid*. Invalid rows never fall
into a bin. The argument ``denominator`` decides whether they still count in the denominator:

- ``"valid"`` (default): N is the number of valid rows, so an unparsable response cannot improve the
  score;
- ``"all"``: N is the number of all rows, as in the reference evaluation (an invalid row then
  contributes zero error).

Bins are equal-width on [0, 1], closed on the right, the first one also on the left: [0, .05], (.05,
.10], ... (.95, 1]. Verbal confidences are often on the edges (.85, .9, .95), so the rule matters.
``M`` in the papers is ``bins``, 20 by default.

With M bins, n_b rows in bin b, N rows, acc_b and conf_b the means of the bin:

    ECE = sum_b n_b / N |acc_b - conf_b|                  (Naeini 2015; Guo 2017)
    PCE = the same sum over bins with conf_b > acc_b      (DCPO: the over-confident part, <= ECE)
    MCE = max_b |acc_b - conf_b|
    Brier = mean (c - y)^2 = reliability - resolution + uncertainty + within-bin
                                                          (Murphy 1973; Stephenson 2008)

Without rows, or without valid ones, every metric is NaN. With one class only, AUROC is NaN; without
a correct row, AUPRC is NaN.

Why not scikit-learn and SciPy (the test suite compares with them, to 1e-12): their import takes a
second, and a training step logs these numbers; they raise or warn for a single class or no row,
which happens; ``binomtest`` takes one share at a time; and ``scipy.stats.bootstrap`` does not
resample problems with all their repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Confidences = Sequence[float | None] | np.ndarray
Correct = Sequence[float] | Sequence[int] | Sequence[bool] | np.ndarray
Denominator = Literal["valid", "all"]
Metric = Callable[[np.ndarray, np.ndarray], float]

DEFAULT_BINS = 20
NO_SPREAD = 1e-12  # what rounding leaves of the width of an interval
NORMAL_975 = 1.959963984540054  # the standard normal distribution's quantile of .975


@dataclass(frozen=True)
class Bins:
    """The valid rows sorted into bins. ``edges`` [M+1]; the others [M]. Empty bins have NaN means,
    zero sums.
    """

    edges: np.ndarray
    count: np.ndarray
    confidence_sum: np.ndarray
    correct_sum: np.ndarray

    @property
    def confidence(self) -> np.ndarray:
        """Return the mean confidence per bin [M]."""
        return _ratio(self.confidence_sum, self.count)

    @property
    def accuracy(self) -> np.ndarray:
        """Return the share of correct rows per bin [M]."""
        return _ratio(self.correct_sum, self.count)

    @property
    def excess(self) -> np.ndarray:
        """Return n_b (conf_b - acc_b) per bin [M], positive if the model is over-confident."""
        return self.confidence_sum - self.correct_sum


@dataclass(frozen=True)
class BrierParts:
    """Brier = reliability - resolution + uncertainty + within_bin.

    ``within_bin`` (variance of c minus twice its covariance with y inside the bins) is 0 when the
    confidences of each bin are equal; leaving it out is the usual reason why published parts do not
    add up to the score.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within_bin: float


# ------------------------------------------------------------------------------------ rows and bins


def accuracy(correct: Correct) -> float:
    """Return the share of correct rows; rows with an unparsed confidence count."""
    return _mean(as_correct(correct))


def bin_rows(
    confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS, mass: bool = False
) -> Bins:
    """Sort the valid rows into ``bins`` equal-width bins, or (``mass``) into bins of about equal
    counts.

    Equal-mass bins end on observed values, so ties share a bin and there may be fewer than ``bins``
    of them.
    """
    c, y = valid_rows(confidences, correct)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    if not mass:
        # i / bins is the double nearest to the edge, so that 0.15 is exactly an edge
        edges = np.arange(bins + 1) / bins
    elif len(c):
        upper = np.quantile(c, np.arange(1, bins + 1) / bins, method="inverted_cdf")
        edges = np.concatenate([[0.0], np.unique(upper)])
    else:
        edges = np.array([0.0, 1.0])
    count = len(edges) - 1
    # A float32 confidence is compared with float32 edges, otherwise float32(0.15) > 0.15 would
    # leave its bin.
    index = np.searchsorted(edges[1:].astype(c.dtype), c, side="left")
    weights = c.astype(np.float64)
    return Bins(
        edges=edges,
        count=np.bincount(index, minlength=count),
        confidence_sum=np.bincount(index, weights=weights, minlength=count),
        correct_sum=np.bincount(index, weights=y, minlength=count),
    )


# ------------------------------------------------------------------------------------ binned errors


def ece(
    confidences: Confidences,
    correct: Correct,
    bins: int = DEFAULT_BINS,
    denominator: Denominator = "valid",
) -> float:
    """Return the expected calibration error, in [0, 1]."""
    total = _denominator(confidences, correct, denominator)
    if total:
        return float(np.abs(bin_rows(confidences, correct, bins).excess).sum() / total)
    return float("nan")


def pce(
    confidences: Confidences,
    correct: Correct,
    bins: int = DEFAULT_BINS,
    denominator: Denominator = "valid",
) -> float:
    """Return the positive calibration error: ECE restricted to the over-confident bins. Never above
    ``ece`` of the same bins.
    """
    total = _denominator(confidences, correct, denominator)
    if total:
        return float(np.maximum(bin_rows(confidences, correct, bins).excess, 0.0).sum() / total)
    return float("nan")


def mce(confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS) -> float:
    """Return the maximum calibration error over the bins that are not empty."""
    rows = bin_rows(confidences, correct, bins)
    gaps = np.abs(_ratio(rows.excess, rows.count))
    return float(np.nanmax(gaps)) if rows.count.any() else float("nan")


def ece_equal_mass(confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS) -> float:
    """Return ECE over bins of about equal counts (Nixon 2019), which does not depend on where the
    confidences concentrate.
    """
    rows = bin_rows(confidences=confidences, correct=correct, bins=bins, mass=True)
    total = int(rows.count.sum())
    if total:
        return float(np.abs(rows.excess).sum() / total)
    return float("nan")


# ------------------------------------------------------------------------------------ proper scores


def brier(confidences: Confidences, correct: Correct) -> float:
    """Return the mean squared error of the valid confidences."""
    c, y = valid_rows(confidences, correct)
    return _mean((c.astype(np.float64) - y) ** 2)


def brier_decomposition(
    confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS
) -> BrierParts:
    """Return the parts of the Brier score: miscalibration, discrimination, difficulty, and the
    variation within bins.
    """
    rows = bin_rows(confidences, correct, bins)
    n = float(rows.count.sum())
    if n == 0:
        nan = float("nan")
        return BrierParts(reliability=nan, resolution=nan, uncertainty=nan, within_bin=nan)
    base_rate = rows.correct_sum.sum() / n
    gap = np.nan_to_num(rows.confidence - rows.accuracy)
    spread = np.nan_to_num(rows.accuracy - base_rate)
    reliability = float((rows.count * gap**2).sum() / n)
    resolution = float((rows.count * spread**2).sum() / n)
    uncertainty = float(base_rate * (1.0 - base_rate))
    within = brier(confidences, correct) - (reliability - resolution + uncertainty)
    return BrierParts(
        reliability=reliability, resolution=resolution, uncertainty=uncertainty, within_bin=within
    )


def nll(confidences: Confidences, correct: Correct) -> float:
    """Return the negative log-likelihood in nats; confidences stay one double epsilon away from 0
    and 1, as in scikit-learn.
    """
    c, y = valid_rows(confidences, correct)
    eps = np.finfo(np.float64).eps
    p = np.clip(c.astype(np.float64), eps, 1.0 - eps)
    return _mean(-np.where(y == 1.0, np.log(p), np.log1p(-p)))


# ------------------------------------------------------------------------------------------ ranking


def auroc(confidences: Confidences, correct: Correct) -> float:
    """Return the probability that a correct row states more confidence than a wrong one, ties one
    half (Mann-Whitney).

    Any score ranks, also outside [0, 1], so token log-probs and the reference's sentinels work. NaN
    rows are left out. One class only: NaN (scikit-learn raises or warns there).
    """
    s, y = ranked_rows(confidences, correct)
    one_kind = np.zeros(len(s), dtype=np.int64)
    won, pairs = pairs_won(s, y, codes=one_kind, count=1)
    if pairs[0] == 0:
        return float("nan")
    return float(won[0] / pairs[0])


def pairs_won(
    scores: np.ndarray, correct: np.ndarray, codes: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each of ``count`` kinds the number of pairs of a correct and a wrong row in which
    the correct one has the higher score, a tie counting one half, and the number of all its pairs,
    both float64 [count]. ``codes`` [N] are the numbers of the rows' kinds; no score may be NaN.
    """
    order = np.lexsort((scores, codes))
    s = scores[order]
    k = codes[order]
    y = correct[order]
    is_new = np.ones(len(s), dtype=bool)  # a row that does not tie with the one before it
    is_new[1:] = (s[1:] != s[:-1]) | (k[1:] != k[:-1])
    tied = np.bincount(np.cumsum(is_new) - 1)
    mean_rank = np.repeat(np.cumsum(tied) - (tied - 1) / 2.0, tied)
    rows = np.bincount(k, minlength=count)
    rank = mean_rank - (np.cumsum(rows) - rows)[k]  # among the rows of its kind, from 1
    positives = np.bincount(k, weights=y, minlength=count)
    rank_sum = np.bincount(k, weights=rank * y, minlength=count)
    won = rank_sum - positives * (positives + 1.0) / 2.0
    return won, positives * (rows - positives)


def auprc(confidences: Confidences, correct: Correct) -> float:
    """Return the average precision: the sum over falling thresholds of (recall step) x precision;
    NaN without a correct row.
    """
    s, y = ranked_rows(confidences, correct)
    if not (y == 1).any():
        return float("nan")
    values, inverse, count = np.unique(-s, return_inverse=True, return_counts=True)
    hits = np.bincount(inverse, weights=y, minlength=len(values))
    precision = np.cumsum(hits) / np.cumsum(count)
    return float((hits * precision).sum() / hits.sum())


# ------------------------------------------------------------------------------------- plain shares


def overconfidence(confidences: Confidences, correct: Correct) -> float:
    """Return the mean confidence minus the accuracy over the valid rows: positive if the model
    claims more than it achieves.
    """
    c, y = valid_rows(confidences, correct)
    return _mean(c.astype(np.float64)) - _mean(y)


def parse_rate(confidences: Confidences) -> float:
    """Return the share of rows with a valid confidence."""
    return _mean(is_valid(as_confidences(confidences)).astype(np.float64))


def pessimistic(
    confidences: Confidences, correct: Correct, fill: Literal["farthest", "half"] = "farthest"
) -> np.ndarray:
    """Return the confidences [N] with every invalid one replaced: by the wrong end of the scale (1
    - y), or by one half.

    Metrics of the result bound what a model could gain by not answering.
    """
    c = as_confidences(confidences)
    y = as_correct(correct)
    _same_length(c, y)
    filled = c.astype(np.float64)
    invalid = ~is_valid(c)
    filled[invalid] = 1.0 - y[invalid] if fill == "farthest" else 0.5
    return filled


# ---------------------------------------------------------------------------------------- intervals


def wilson_interval(
    successes: np.ndarray, count: np.ndarray, z: float = NORMAL_975
) -> tuple[np.ndarray, ...]:
    """Return the Wilson score interval (low [M], high [M]) of shares; 95 % by default. Takes the
    samples as independent.
    """
    share = successes / count
    center = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return center - half, center + half


def wilson_of_equal(share: float, problems: int) -> list[float]:
    """Return the 95 % interval [low, high] of an accuracy of 0 or 1 on so many problems: a
    bootstrap of equal problems knows no spread, and so few problems still leave one (3 of 3: 44 to
    100 %).
    """
    low, high = wilson_interval(np.array([share * problems]), np.array([problems]))
    return [float(low[0]), float(high[0])]


def bootstrap_ci(
    metric: Metric,
    confidences: Confidences,
    correct: Correct,
    problem_ids: Sequence[Any] | np.ndarray | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of ``metric(confidences, correct)``, from
    ``resamples`` resamples of whole problems.

    Repeats of one problem are not independent, hence the clusters; without ``problem_ids`` every
    row is a cluster. Resamples with a NaN metric (one class only) are left out. Resamples that do
    not differ, of one problem or of equal ones, know no spread: the ends are then NaN. Use
    ``binned.binned_error`` for ECE and PCE, whose resamples are biased upwards.
    """
    c = as_confidences(confidences)
    y = as_correct(correct)
    _same_length(c, y)
    if len(y) == 0 or np.isnan(metric(c, y)):
        return float("nan"), float("nan")
    values = np.array(
        [metric(c[rows], y[rows]) for rows in resampled_rows(problem_ids, len(y), resamples, seed)]
    )
    low, high = percentiles(values, level)
    if high - low <= NO_SPREAD:
        return float("nan"), float("nan")
    return low, high


def resampled_rows(
    problem_ids: Sequence[Any] | np.ndarray | None, n: int, resamples: int, seed: int
) -> Iterator[np.ndarray]:
    """Yield the row numbers of each resample of whole problems; without ``problem_ids`` each of the
    ``n`` rows is a problem.
    """
    clusters = _clusters(problem_ids, n)
    generator = np.random.default_rng(seed)
    for _ in range(resamples):
        drawn = generator.integers(len(clusters), size=len(clusters))
        yield np.concatenate([clusters[j] for j in drawn])


def percentiles(values: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the ends of the interval that holds the share ``level`` of the values in its middle;
    NaN values are left out.
    """
    defined = values[~np.isnan(values)]
    if len(defined) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(defined, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def _clusters(problem_ids: Sequence[Any] | np.ndarray | None, n: int) -> list[np.ndarray]:
    """Return the row numbers of each problem."""
    if problem_ids is None:
        return list(np.arange(n)[:, None])
    if len(problem_ids) != n:
        raise ValueError(f"{len(problem_ids)} problem ids for {n} rows")
    rows: dict[Any, list[int]] = {}
    for row, problem in enumerate(problem_ids):
        rows.setdefault(problem, []).append(row)
    return [np.array(group) for group in rows.values()]


# ------------------------------------------------------------------------------------------- checks


def as_confidences(confidences: Confidences) -> np.ndarray:
    """Return a floating array [N]; ``None`` becomes NaN."""
    if isinstance(confidences, np.ndarray) and np.issubdtype(confidences.dtype, np.floating):
        array = confidences
    else:
        array = np.array([np.nan if c is None else c for c in confidences], dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"confidences must be one-dimensional, got shape {array.shape}")
    return array


def as_correct(correct: Correct) -> np.ndarray:
    y = np.asarray(correct, dtype=np.float64)
    if y.ndim != 1:
        raise ValueError(f"correct must be one-dimensional, got shape {y.shape}")
    if not ((y == 0.0) | (y == 1.0)).all():
        raise ValueError("correct must hold only 0 and 1")
    return y


def _same_length(c: np.ndarray, y: np.ndarray) -> None:
    if len(c) != len(y):
        raise ValueError(f"{len(c)} confidences for {len(y)} rows of correct")


def is_valid(c: np.ndarray) -> np.ndarray:
    return (c >= 0.0) & (c <= 1.0)  # NaN compares false


def valid_rows(confidences: Confidences, correct: Correct) -> tuple[np.ndarray, np.ndarray]:
    c = as_confidences(confidences)
    y = as_correct(correct)
    _same_length(c, y)
    valid = is_valid(c)
    return c[valid], y[valid]


def ranked_rows(scores: Confidences, correct: Correct) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows with a score, of any size."""
    s = as_confidences(scores)
    y = as_correct(correct)
    _same_length(s, y)
    ranked = ~np.isnan(s)
    return s[ranked], y[ranked]


def _denominator(confidences: Confidences, correct: Correct, denominator: Denominator) -> int:
    if denominator == "valid":
        return len(valid_rows(confidences, correct)[0])
    if denominator == "all":
        return len(as_correct(correct))
    raise ValueError(f"denominator must be 'valid' or 'all', got {denominator!r}")


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _ratio(numerator: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return numerator / count [M], NaN for empty bins."""
    return np.divide(numerator, count, out=np.full(len(count), np.nan), where=count > 0)


def ece_adaptive(confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS) -> float:
    """Return the adaptive calibration error (Nixon 2019): the plain mean of the gaps of ``bins``
    groups of equal size.

    The sorted rows are cut into groups whose sizes differ by at most one, so a crowded value may be
    cut, unlike in ``ece_equal_mass``; each of its rows then counts as its share of right ones, so
    that the order of the rows does not matter. Fewer rows than bins: one group per row.
    """
    c, y = valid_rows(confidences, correct)
    if not len(c):
        return float("nan")
    _, value = np.unique(c, return_inverse=True)
    accuracy = (np.bincount(value, y) / np.bincount(value))[value]
    groups = np.array_split(np.argsort(c), min(bins, len(c)))
    gaps = [abs(c[group].astype(np.float64).mean() - accuracy[group].mean()) for group in groups]
    return float(np.mean(gaps))


def ece_debiased(confidences: Confidences, correct: Correct, bins: int = DEFAULT_BINS) -> float:
    """Return the debiased root-mean-square calibration error (Kumar 2019, equation of the debiased
    estimator).

    sqrt(max(0, sum_b n_b/N [(acc_b - conf_b)^2 - acc_b (1 - acc_b) / (n_b - 1)])). The plain ECE of
    a perfectly calibrated model is positive for every finite sample; this one is near zero. A bin
    of one row, whose variance is not known, adds nothing to the sum, as in the authors' package
    (uncertainty-calibration 0.1.4).
    """
    rows = bin_rows(confidences, correct, bins)
    filled = rows.count > 0
    count = rows.count[filled]
    if not len(count):
        return float("nan")
    accuracy = rows.accuracy[filled]
    gap = rows.confidence[filled] - rows.accuracy[filled]
    variance = accuracy * (1.0 - accuracy) / np.maximum(count - 1, 1)
    error = np.where(count > 1, gap**2 - variance, 0.0)
    return float(np.sqrt(max(0.0, ((count / count.sum()) * error).sum())))
