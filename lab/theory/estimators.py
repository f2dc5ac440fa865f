"""Study the group as estimator of a prompt's accuracy p (paper, group-level target), exactly.

* The group accuracy of G responses is unbiased with variance p(1 - p)/G; a single label has p(1 - p).
* Descending |c - t|, the step is sign(c - t). With single labels its variance is 4p(1 - p); with the exact accuracy, 0;
  with the group accuracy of G, 4q(1 - q) where q = P(Rt < c), which falls exponentially in G except around c = p: there it
  can exceed the single label's (p = 0.2, G = 8, c just above p: 1.00 against 0.64).
* The advantage of a confidence is noisy twice: by the sampled c, which is what it should judge, and by the sampled
  label. A Brier score is -c^2 + (2c - 1) R, so the label's noise enters with 2c - 1; against the counterfactual baseline
  of ``objectives.dcpo`` it enters with 2(c - mean c) only, which is little wherever the confidence is near 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from lab.theory.gradient_conflict import sampled_gradient, softmax
from lab.theory.scoring_rules import confidence_advantages
from megatron_dcpo.objectives import ObjectiveConfig, resolve


def target_variance(p: float, group_size: int) -> float:
    """Return Var(Rt) = p(1 - p)/G, by enumeration of the binomial."""
    k = np.arange(group_size + 1)
    weights = stats.binom.pmf(k, group_size, p)
    mean = float(weights @ (k / group_size))
    return float(weights @ (k / group_size - mean) ** 2)


def subgradient_variance(c: float, p: float, group_size: int) -> float:
    """Return the variance of sign(c - t) for t the accuracy of ``group_size`` responses; 4p(1 - p) for one."""
    k = np.arange(group_size + 1)
    weights, sign = stats.binom.pmf(k, group_size, p), np.sign(c - k / group_size)
    mean = float(weights @ sign)
    return float(weights @ (sign - mean) ** 2)


@dataclass(frozen=True)
class GradientNoise:
    """Hold the mean [L] of one group's confidence gradient and the trace of its covariance."""

    mean: np.ndarray
    variance: float


def confidence_gradient_noise(
    objective: ObjectiveConfig,
    p: float,
    logits: np.ndarray,
    levels: np.ndarray,
    group_size: int,
    samples: int,
    rng: np.random.Generator,
) -> GradientNoise:
    """Sample the policy gradient (1/G) sum_i A_c,i grad log pi(c_i) of a tabular confidence policy softmax(``logits``) [L].

    Labels are Bernoulli(``p``), confidences are ``levels`` [L]; advantages are the trainer's own. ``samples`` groups.
    """
    options = resolve(objective)
    pi = softmax(logits)
    gradients = np.zeros((samples, len(levels)))
    for n in range(samples):
        correct = (rng.random(group_size) < p).astype(np.float64)
        chosen = rng.choice(len(levels), group_size, p=pi)
        A_c = confidence_advantages(correct, levels[chosen], options)
        gradients[n] = sampled_gradient(pi, chosen, A_c)
    mean = gradients.mean(0)
    return GradientNoise(mean, float(((gradients - mean) ** 2).sum(1).mean()))
