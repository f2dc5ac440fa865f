"""pass@k: the probability that at least one of k responses to a problem is right."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dcpo.evaluation.samples import Sample


@dataclass(frozen=True)
class PassAtK:
    """``values`` of k, the mean over the problems, and the 95 % interval [low, high] of each, none
    without resamples.
    """

    values: Mapping[int, float]
    intervals: Mapping[int, list[float]]


def pass_at_k(count: int, right: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n - c, k) / C(n, k) of one problem with n responses, of
    which c are right (Chen et al. 2021). Raises ValueError unless 1 <= k <= n.
    """
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {count} responses")
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def passes(samples: Sequence[Sample], resamples: int, seed: int) -> PassAtK:
    """Return pass@k of all problems of the samples, for the k that every problem has responses for:
    the powers of two and the largest. Intervals are percentiles of a bootstrap over problems.
    """
    counts: dict[tuple[str, str], list[int]] = {}
    for sample in samples:
        of_problem = counts.setdefault(sample.problem_key, [0, 0])
        of_problem[0] += 1
        of_problem[1] += int(sample.correct)
    values: dict[int, float] = {}
    intervals: dict[int, list[float]] = {}
    for k in _sizes(min((count for count, _ in counts.values()), default=0)):
        of_problems = np.array([pass_at_k(n, c, k) for n, c in counts.values()])
        values[k] = float(of_problems.mean())
        if resamples:
            intervals[k] = _interval(of_problems, resamples, seed)
    return PassAtK(values, intervals)


def _sizes(largest: int) -> list[int]:
    sizes = []
    k = 1
    while k < largest:
        sizes.append(k)
        k *= 2
    if largest:
        sizes.append(largest)
    return sizes


def _interval(of_problems: np.ndarray, resamples: int, seed: int) -> list[float]:
    generator = np.random.default_rng(seed)
    count = len(of_problems)
    means = np.empty(resamples)
    for i in range(resamples):
        means[i] = of_problems[generator.integers(count, size=count)].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(low), float(high)]
