"""What a confidence knows beyond the kind of problem, and beyond the problem. NumPy only.

A policy is right more often on some kinds of problem than on others, and a confidence that tells
the kinds apart has a high AUROC even if it knows nothing about the single answer. These numbers
show it:

- :func:`auroc_within`, the AUROC among answers to problems of one kind. With the pairs of a right
  and a wrong answer of kind k, of which P_k there are and in which the right one has the higher
  confidence W_k times (a tie counts one half),

      AUROC within kinds = sum_k P_k AUROC_k / sum_k P_k = sum_k W_k / sum_k P_k

  A confidence that is constant within each kind has exactly .5;
- :func:`auroc_within_problem`, the AUROC among answers to the same problem, the mean over the
  problems that have a right and a wrong one (within-question discrimination: CISC,
  arXiv:2502.06233). Whoever reads only the question has exactly .5;
- :func:`fitted_lookup`, the share of right answers of the kind, fitted on other problems. It is
  what anybody can state who knows only the kind.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_dcpo.calibration import metrics
from megatron_dcpo.calibration.metrics import Confidences, Correct

FOLDS = 5

Kinds = Sequence[Hashable] | np.ndarray


@dataclass(frozen=True)
class WithinKinds:
    """``value`` is the AUROC within kinds, NaN if no kind has a right and a wrong answer. ``used``
    is the number of kinds that have both, ``left_out`` that of the others.
    """

    value: float
    used: int
    left_out: int


def auroc_within(confidences: Confidences, correct: Correct, kinds: Kinds) -> WithinKinds:
    """Return the mean AUROC within the kinds [N] of the rows, weighted by their numbers of (right,
    wrong) pairs.

    Any score ranks, and rows of NaN or None are left out, as in ``auroc``. A kind without a right
    or without a wrong row that has a score is left out and counted. None is a kind like any other.
    """
    scores = metrics.as_confidences(confidences)
    y = metrics.as_correct(correct)
    codes = _codes(kinds, len(y))
    return _within(scores, y, codes, count=_count(codes))


def auroc_within_ci(
    confidences: Confidences,
    correct: Correct,
    kinds: Kinds,
    problem_ids: Sequence[Any] | np.ndarray | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of ``auroc_within`` from a bootstrap over problems, with
    the resamples of ``bootstrap_ci``; NaN if the value is, or if there is one problem alone.
    """
    scores = metrics.as_confidences(confidences)
    y = metrics.as_correct(correct)
    codes = _codes(kinds, len(y))
    count = _count(codes)
    problems = len(y) if problem_ids is None else len(set(problem_ids))
    if problems < 2 or math.isnan(_within(scores, y, codes, count).value):
        return math.nan, math.nan
    values = [
        _within(scores[rows], y[rows], codes[rows], count).value
        for rows in metrics.resampled_rows(problem_ids, len(y), resamples, seed)
    ]
    return metrics.percentiles(np.array(values))


@dataclass(frozen=True)
class WithinProblems:
    """``value`` is the mean AUROC within a problem, NaN if no problem has a right and a wrong
    answer. ``mixed`` is the number of problems that have both.
    """

    value: float
    mixed: int


def auroc_within_problem(
    confidences: Confidences, correct: Correct, problem_ids: Sequence[Any] | np.ndarray
) -> WithinProblems:
    """Return the AUROC among the answers to one problem, averaged over the problems that have a
    right and a wrong answer with a score. Any score ranks; rows of NaN or None are left out.
    """
    values = _of_problems(confidences, correct, problem_ids)
    mixed = values[~np.isnan(values)]
    return WithinProblems(value=float(mixed.mean()) if len(mixed) else math.nan, mixed=len(mixed))


def auroc_within_problem_ci(
    confidences: Confidences,
    correct: Correct,
    problem_ids: Sequence[Any] | np.ndarray,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95 % percentile interval of ``auroc_within_problem`` from a bootstrap over the
    problems that have a right and a wrong answer; NaN if there are fewer than two.
    """
    values = _of_problems(confidences, correct, problem_ids)
    mixed = values[~np.isnan(values)]
    if len(mixed) < 2:
        return math.nan, math.nan
    generator = np.random.default_rng(seed)
    means = [
        generator.choice(mixed, size=len(mixed), replace=True).mean() for _ in range(resamples)
    ]
    return metrics.percentiles(np.array(means))


def _of_problems(
    confidences: Confidences, correct: Correct, problem_ids: Sequence[Any] | np.ndarray
) -> np.ndarray:
    """Return the AUROC within each problem, NaN where it has no right or no wrong answer."""
    scores, y = metrics.as_confidences(confidences), metrics.as_correct(correct)
    codes = _codes(problem_ids, len(y))
    ranked = ~np.isnan(scores)
    won, pairs = metrics.pairs_won(scores[ranked], y[ranked], codes[ranked], _count(codes))
    return np.divide(won, pairs, out=np.full(len(pairs), math.nan), where=pairs > 0)


def fitted_lookup(
    correct: Correct,
    kinds: Kinds,
    problem_ids: Sequence[Any] | np.ndarray | None = None,
    folds: int = FOLDS,
) -> np.ndarray:
    """Return, for each row, the share of right rows of its kind [N], fitted on the problems of the
    other folds; for a kind that none of these has, the share of all their rows; NaN if there is
    only one problem.

    The rows of one problem are in one fold, so they are never fitted and looked up together;
    without ``problem_ids`` every row is its own problem. Problems are dealt to the folds in the
    order of their kinds and of a hash of their names, so a kind of two problems is always fitted,
    and the order of the rows changes nothing.
    """
    if folds < 2:
        raise ValueError(f"folds must be at least 2, got {folds}")
    y = metrics.as_correct(correct)
    codes = _codes(kinds, len(y))
    fold = folds_of(kinds, problem_ids, folds)
    count = _count(codes)
    lookup = np.full(len(y), math.nan)
    for number in range(folds):
        inside = fold == number
        fitted = ~inside
        if not fitted.any():
            continue
        rows = np.bincount(codes[fitted], minlength=count)
        right = np.bincount(codes[fitted], weights=y[fitted], minlength=count)
        of_all = float(y[fitted].mean())
        shares = np.divide(right, rows, out=np.full(count, of_all), where=rows > 0)
        lookup[inside] = shares[codes[inside]]
    return lookup


def folds_of(
    kinds: Kinds, problem_ids: Sequence[Any] | np.ndarray | None = None, folds: int = FOLDS
) -> np.ndarray:
    """Return the fold of each row, int64 [N], in which :func:`fitted_lookup` has it.

    Rows of different folds are not to be ranked against each other: a fold with more right answers
    leaves fewer to the others, so its numbers are lower, and the AUROC of a lookup that knows
    nothing is below .5.
    """
    problems = range(len(kinds)) if problem_ids is None else problem_ids
    if len(problems) != len(kinds):
        raise ValueError(f"{len(problems)} problem ids for {len(kinds)} rows")
    kind_of: dict[Any, str] = {}
    for problem, kind in zip(problems, kinds, strict=True):
        kind_of[problem] = min(str(kind), kind_of.get(problem, str(kind)))
    dealt = sorted(kind_of, key=lambda problem: (kind_of[problem], _digest(problem)))
    fold_of = {problem: number % folds for number, problem in enumerate(dealt)}
    return np.array([fold_of[problem] for problem in problems], dtype=np.int64)


def _within(scores: np.ndarray, y: np.ndarray, codes: np.ndarray, count: int) -> WithinKinds:
    """Return the AUROC within kinds, whose numbers 0 .. count - 1 are ``codes`` [N]."""
    ranked = ~np.isnan(scores)
    won, pairs = metrics.pairs_won(scores[ranked], y[ranked], codes[ranked], count)
    used = int((pairs > 0).sum())
    value = float(won.sum() / pairs.sum()) if used else math.nan
    return WithinKinds(value=value, used=used, left_out=count - used)


def _codes(kinds: Kinds, n: int) -> np.ndarray:
    """Return a number for the kind of each row, int64 [N], by order of appearance."""
    if len(kinds) != n:
        raise ValueError(f"{len(kinds)} kinds for {n} rows")
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    return np.array(codes, dtype=np.int64)


def _count(codes: np.ndarray) -> int:
    return int(codes.max(initial=-1)) + 1


def _digest(problem: object) -> str:
    return hashlib.blake2b(str(problem).encode(errors="surrogatepass"), digest_size=8).hexdigest()
