"""Which confidence an objective asks for: the optimum of the expected score, and where training actually settles.

``optimum`` is exact: the level with the best expected score when labels are Bernoulli(p). ``settle`` trains a tabular
confidence policy with the trainer's own advantages, so that it also shows what dividing by the standard deviation does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from megatron_dcpo.objectives import ObjectiveConfig
from megatron_dcpo.objectives.advantages import Group
from megatron_dcpo.objectives.dcpo import score_group
from megatron_dcpo.objectives.scores import SCORES

LEVELS = np.linspace(0, 1, 101)


def optimum(score: str, lam: float, p: float, group_size: int = 0, q: float | None = None) -> float:
    """The confidence with the best expected score, on the grid of two decimals.

    t = lam * Rt + (1 - lam) * R_i with R_i ~ Bernoulli(``q``; default ``p``), the others Bernoulli(``p``). ``group_size`` 0:
    Rt is p exactly. ``q`` is what the response itself reveals about its being right: the confidence sees the response.
    """
    q = p if q is None else q
    expected = np.zeros(len(LEVELS))
    for R, weight in ((1.0, q), (0.0, 1 - q)):
        if group_size == 0:
            expected += weight * SCORES[score](LEVELS, np.full(len(LEVELS), lam * p + (1 - lam) * R), 0.01)
            continue
        for k in range(group_size):
            t = lam * (k + R) / group_size + (1 - lam) * R
            chance = weight * stats.binom.pmf(k, group_size - 1, p)
            expected += chance * SCORES[score](LEVELS, np.full(len(LEVELS), t), 0.01)
    return float(LEVELS[int(np.argmax(expected))])


def l1_optimum(lam: float, p: float) -> float:
    """The median of t for an exact Rt: lam p + (1 - lam) above p = 1/2, lam p below (lam < 1)."""
    return lam * p + (1 - lam) * (p > 0.5)


@dataclass(frozen=True)
class Settled:
    """Where a tabular confidence policy ends: mean and standard deviation of its confidence."""

    mean: float
    sd: float


def settle(
    objective: ObjectiveConfig, p: float, *, group_size: int, steps: int, lr: float, rng: np.random.Generator
) -> Settled:
    """Train softmax(theta) over 21 levels on groups with labels Bernoulli(``p``); averages over the last quarter."""
    options, levels = objective.resolve(), np.linspace(0, 1, 21)
    theta = np.zeros(len(levels))
    tail: list[tuple[float, float]] = []
    for step in range(steps):
        pi = np.exp(theta - theta.max())
        pi /= pi.sum()
        correct = (rng.random(group_size) < p).astype(np.float64)
        chosen = rng.choice(len(levels), group_size, p=pi)
        A_c = score_group(Group(correct, levels[chosen], levels[chosen]), options).A_c
        weight = options.weight.confidence
        theta += lr * weight * (np.bincount(chosen, weights=A_c, minlength=len(levels)) / group_size - pi * A_c.mean())
        if step >= 3 * steps // 4:
            mean = float(pi @ levels)
            tail.append((mean, float(np.sqrt(pi @ (levels - mean) ** 2))))
    means, sds = zip(*tail, strict=True)
    return Settled(float(np.mean(means)), float(np.mean(sds)))


def saturated_push(objective: ObjectiveConfig, confidences: np.ndarray) -> float:
    """Largest |A_c| times the block's weight in a group that is all right and states ``confidences`` [G].

    Divided by the standard deviation it is the same however close the confidences are to each other and to 1: the push to
    exactly 1 never ends. Centred only, it fades with the differences themselves.
    """
    options = objective.resolve()
    c = np.asarray(confidences, np.float64)
    A_c = score_group(Group(np.ones(len(c)), c, c), options).A_c
    return float(np.abs(A_c).max() * options.weight.confidence)
