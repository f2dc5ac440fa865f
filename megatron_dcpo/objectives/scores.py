"""Scores of a stated confidence against its target, and the calibration reward R_c built on them.

Every score is scaled to [-1, 0], 0 the best, so that the default penalty of -1 for a malformed confidence is never
better than an honest answer, whichever score is chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_dcpo.objectives.advantages import Group
from megatron_dcpo.objectives.options import Options

SENTINEL = -1.0  # the released code's confidence of a response that states none
MAX_STATED = 1e6  # a raw number has no bound; its square must stay finite


def l1(c: np.ndarray, target: np.ndarray, clamp: float = 0.0) -> np.ndarray:
    """-|c - t| (paper, hybrid reward). Not proper: its optimum is a median of t, so it is honest only at lam = 1."""
    return -np.abs(c - target)


def brier(c: np.ndarray, target: np.ndarray, clamp: float = 0.0) -> np.ndarray:
    """-(c - t)^2, strictly proper for E[t]."""
    return -np.square(c - target)


def log(c: np.ndarray, target: np.ndarray, clamp: float = 0.01) -> np.ndarray:
    """t log c + (1 - t) log(1 - c) with c in [clamp, 1 - clamp], divided by -log(clamp) so that the worst is -1."""
    c = np.clip(c, clamp, 1 - clamp)
    return (target * np.log(c) + (1 - target) * np.log1p(-c)) / -np.log(clamp)


def spherical(c: np.ndarray, target: np.ndarray, clamp: float = 0.0) -> np.ndarray:
    """(t c + (1 - t)(1 - c)) / sqrt(c^2 + (1 - c)^2) - 1, strictly proper for E[t]."""
    return (target * c + (1 - target) * (1 - c)) / np.hypot(c, 1 - c) - 1


SCORES: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "l1": l1,
    "brier": brier,
    "log": log,
    "spherical": spherical,
}


def calibration_reward(group: Group, target: np.ndarray, options: Options) -> np.ndarray:
    """R_c, float64 [G]: the score of the confidence, and for a malformed one what ``malformed_placement`` says.

    ``confidence`` and ``both``: the constant ``malformed_penalty`` (paper 1.4; right and wrong answers alike).
    ``reasoning``: the mean of the well-formed R_c, hence no confidence advantage; the penalty is in R instead.
    ``sentinel``: the released code, c := the number as written, or -1 when there is none.
    """
    score = SCORES[options.calibration_loss]
    if options.malformed_placement == "sentinel":
        stated = np.where(np.isnan(group.stated), SENTINEL, np.clip(group.stated, -MAX_STATED, MAX_STATED))
        return score(np.where(group.well_formed, group.confidence, stated), target, options.score_clamp)
    rewards = score(np.where(group.well_formed, group.confidence, 0.5), target, options.score_clamp)
    penalty = options.malformed_penalty
    if options.malformed_placement == "reasoning":
        penalty = float(rewards[group.well_formed].mean()) if group.well_formed.any() else 0.0
    return np.where(group.well_formed, rewards, penalty)


def correctness_reward(group: Group, options: Options) -> np.ndarray:
    """R, float64 [G]: 1 for a right answer, else 0; plus the format penalty where it is placed on the reasoning."""
    if options.malformed_placement in ("reasoning", "both"):
        return group.correct + np.where(group.well_formed, 0.0, options.malformed_penalty)
    return group.correct.copy()
