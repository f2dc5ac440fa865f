"""Compute exactly which confidence a score asks for, and what a group tells about a prompt's
accuracy p.

* The optimum of the expected score when labels are Bernoulli(p): a median of the target for the
absolute error.
* The accuracy of a group of G is unbiased with variance p(1 - p)/G; a single label has p(1 - p).
* Descending |c - t|, the step is sign(c - t). With single labels its variance is 4p(1 - p); with
the exact accuracy, 0;
  with the accuracy of G responses 4q(1 - q), q = P(it < c), which falls exponentially in G except
  around c = p: there it
  can exceed the single label's (p = 0.2, G = 8, c just above p: 1.00 against 0.64).
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from megatron_dcpo.objectives import ObjectiveConfig, resolve
from megatron_dcpo.objectives.advantages import SCORING_RULES
from megatron_dcpo.objectives.dcpo import score_group

LEVELS = np.linspace(0, 1, 101)


def confidence_advantages(R: np.ndarray, c: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """Return the trainer's own A_c [G] of a group with labels ``R`` and confidences ``c`` (NaN:
    malformed).
    """
    *_, A_c = score_group(R, c, np.full_like(c, np.nan), options)
    return A_c


def optimum(score: str, lam: float, p: float, group_size: int = 0, q: float | None = None) -> float:
    """Return the confidence with the best expected score, on the grid of two decimals.

    t = lam * Rt + (1 - lam) * R_i with R_i ~ Bernoulli(``q``; default ``p``), the others
    Bernoulli(``p``). ``group_size`` 0: Rt is p exactly. ``q`` is the probability that this response
    is right, which the confidence may depend on.
    """
    q = p if q is None else q
    expected = np.zeros(len(LEVELS))
    for R, weight in ((1.0, q), (0.0, 1 - q)):
        if group_size == 0:
            expected += weight * SCORING_RULES[score](
                LEVELS, np.full(len(LEVELS), lam * p + (1 - lam) * R)
            )
            continue
        for k in range(group_size):
            t = lam * (k + R) / group_size + (1 - lam) * R
            chance = weight * stats.binom.pmf(k, group_size - 1, p)
            expected += chance * SCORING_RULES[score](LEVELS, np.full(len(LEVELS), t))
    return float(LEVELS[int(np.argmax(expected))])


def saturated_push(objective: ObjectiveConfig, confidences: np.ndarray) -> float:
    """Return the largest |A_c| times the block's weight in a group that is all right and states
    ``confidences`` [G].

    Divided by the standard deviation it is the same however close the confidences are to each other
    and to 1: the push to exactly 1 never ends. Centred only, it fades with the differences
    themselves.
    """
    options = resolve(objective)
    c = np.asarray(confidences, np.float64)
    return float(
        np.abs(confidence_advantages(np.ones(len(c)), c, options)).max() * options.weights[1]
    )


def target_variance(p: float, group_size: int) -> float:
    """Return Var(Rt) = p(1 - p)/G, by enumeration of the binomial."""
    return _variance(np.arange(group_size + 1) / group_size, p)


def subgradient_variance(c: float, p: float, group_size: int) -> float:
    """Return the variance of sign(c - t) for t the accuracy of ``group_size`` responses; 4p(1 - p)
    for one.
    """
    return _variance(np.sign(c - np.arange(group_size + 1) / group_size), p)


def _variance(values: np.ndarray, p: float) -> float:
    """Return the variance of ``values`` [G + 1], by the number of right responses."""
    weights = stats.binom.pmf(np.arange(len(values)), len(values) - 1, p)
    return float(weights @ (values - weights @ values) ** 2)
