"""Compute which confidence an objective asks for: the optimum of the expected score, and where training settles.

``optimum`` is exact: the level with the best expected score when labels are Bernoulli(p). ``settle`` trains a tabular
confidence policy with the trainer's own advantages, so that it also shows what dividing by the standard deviation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from lab.theory.gradient_conflict import sampled_gradient
from megatron_dcpo.objectives import ObjectiveConfig, resolve
from megatron_dcpo.objectives.advantages import SCORING_RULES, batch_scale
from megatron_dcpo.objectives.dcpo import score_group

LEVELS = np.linspace(0, 1, 101)


def confidence_advantages(R: np.ndarray, c: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """Return the trainer's own A_c [G] of a group with labels ``R`` and confidences ``c`` (NaN: malformed)."""
    *_, A_c = score_group(R, c, np.full_like(c, np.nan), options)
    return A_c


def optimum(score: str, lam: float, p: float, group_size: int = 0, q: float | None = None) -> float:
    """Return the confidence with the best expected score, on the grid of two decimals.

    t = lam * Rt + (1 - lam) * R_i with R_i ~ Bernoulli(``q``; default ``p``), the others Bernoulli(``p``). ``group_size`` 0:
    Rt is p exactly. ``q`` is the probability that this response is right, which the confidence may depend on.
    """
    q = p if q is None else q
    expected = np.zeros(len(LEVELS))
    for R, weight in ((1.0, q), (0.0, 1 - q)):
        if group_size == 0:
            expected += weight * SCORING_RULES[score](LEVELS, np.full(len(LEVELS), lam * p + (1 - lam) * R))
            continue
        for k in range(group_size):
            t = lam * (k + R) / group_size + (1 - lam) * R
            chance = weight * stats.binom.pmf(k, group_size - 1, p)
            expected += chance * SCORING_RULES[score](LEVELS, np.full(len(LEVELS), t))
    return float(LEVELS[int(np.argmax(expected))])


def l1_optimum(lam: float, p: float) -> float:
    """Return the median of t for an exact Rt: lam p + (1 - lam) above p = 1/2, lam p below (lam < 1)."""
    return lam * p + (1 - lam) * (p > 0.5)


@dataclass(frozen=True)
class Settled:
    """Hold where a tabular confidence policy ends: mean and standard deviation of its confidence."""

    mean: float
    sd: float


def settle(
    objective: ObjectiveConfig,
    probabilities: Sequence[float],
    *,
    group_size: int,
    groups: int,
    steps: int,
    lr: float,
    rng: np.random.Generator,
) -> list[Settled]:
    """Train one softmax(theta) over 21 levels for each p, all in the same batches; averages over the last quarter.

    A batch has ``groups`` groups of every p, with labels Bernoulli(p); the advantages are DCPO's own.
    """
    options, levels = resolve(objective), np.linspace(0, 1, 21)
    theta = np.zeros((len(probabilities), len(levels)))
    tail: list[tuple[np.ndarray, np.ndarray]] = []
    for step in range(steps):
        pi = np.exp(theta - theta.max(axis=1, keepdims=True))
        pi /= pi.sum(axis=1, keepdims=True)
        chosen = np.stack([rng.choice(len(levels), (groups, group_size), p=row) for row in pi])
        correct = (rng.random(chosen.shape) < np.reshape(probabilities, (-1, 1, 1))).astype(np.float64)
        A_c = np.zeros(chosen.shape)
        for place in np.ndindex(chosen.shape[:2]):
            c = levels[chosen[place]]
            A_c[place] = confidence_advantages(correct[place], c, options)
        if options.advantage_normalization_confidence == "batch_std":
            A_c /= batch_scale(A_c)
        for row, (picked, advantages) in enumerate(zip(chosen, A_c, strict=True)):
            theta[row] += lr * options.weight_confidence * sampled_gradient(pi[row], picked.ravel(), advantages.ravel())
        if step >= 3 * steps // 4:
            means = pi @ levels
            tail.append((means, np.sqrt((pi * (levels - means[:, None]) ** 2).sum(axis=1))))
    means, sds = (np.mean(column, axis=0) for column in zip(*tail, strict=True))
    return [Settled(float(mean), float(sd)) for mean, sd in zip(means, sds, strict=True)]


def saturated_push(objective: ObjectiveConfig, confidences: np.ndarray) -> float:
    """Return the largest |A_c| times the block's weight in a group that is all right and states ``confidences`` [G].

    Divided by the standard deviation it is the same however close the confidences are to each other and to 1: the push to
    exactly 1 never ends. Centred only, it fades with the differences themselves.
    """
    options = resolve(objective)
    c = np.asarray(confidences, np.float64)
    A_c = confidence_advantages(np.ones(len(c)), c, options)
    return float(np.abs(A_c).max() * options.weight_confidence)
