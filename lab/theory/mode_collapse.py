"""Mode collapse (paper): GRPO's reward does not depend on *which* right answer it is, yet the policy ends with one of them.

A tabular policy over K answers, some of them right. The expected step of the mean-centred advantage is the gradient of E[R],
proportional to pi_k (R_k - E[R]): the right answers gain in proportion to what they have, so their relative shares drift to
the largest; sampling a group adds a random walk. Entropy falls towards 0, and the policy's own probability of its answer,
its implicit confidence, rises to 1 whether or not its answers to another prompt are right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.theory.gradient_conflict import sampled_gradient, softmax
from megatron_dcpo.objectives import ObjectiveConfig, resolve
from megatron_dcpo.objectives.advantages import Group
from megatron_dcpo.objectives.grpo import score_group


@dataclass(frozen=True)
class Trajectory:
    """Per step, [steps + 1]: accuracy, entropy in nats, probability of the likeliest answer."""

    accuracy: np.ndarray
    entropy: np.ndarray
    top: np.ndarray


def exact_flow(logits: np.ndarray, R: np.ndarray, steps: int, lr: float) -> Trajectory:
    """Gradient ascent on E[R] with the exact gradient pi_k (R_k - E[R])."""

    def step(z: np.ndarray) -> np.ndarray:
        pi = softmax(z)
        return lr * pi * (R - pi @ R)

    return _follow(logits, R, steps, step)


def grpo_flow(
    logits: np.ndarray, R: np.ndarray, steps: int, lr: float, group_size: int, rng: np.random.Generator
) -> Trajectory:
    """The same with groups of ``group_size`` sampled answers and the trainer's own GRPO advantages."""
    options = resolve(ObjectiveConfig(name="grpo"))

    def step(z: np.ndarray) -> np.ndarray:
        pi = softmax(z)
        chosen = rng.choice(len(z), group_size, p=pi)
        nothing = np.full(group_size, np.nan)
        A = score_group(Group(R[chosen].astype(np.float64), nothing, nothing), options).A_r
        return lr * sampled_gradient(pi, chosen, A)

    return _follow(logits, R, steps, step)


def _follow(logits: np.ndarray, R: np.ndarray, steps: int, step: object) -> Trajectory:
    assert callable(step)
    z = np.array(logits, np.float64)
    rows = []
    for n in range(steps + 1):
        pi = softmax(z)
        rows.append((pi @ R, -(pi * np.log(np.maximum(pi, 1e-300))).sum(), pi.max()))
        if n < steps:
            z = z + step(z)
    accuracy, entropy, top = np.array(rows).T
    return Trajectory(accuracy, entropy, top)
