"""Post-hoc calibration of a GRPO checkpoint (paper, ablation "w/o on-policy training"; inferred, algorithms 3.5).

Start from a GRPO checkpoint and train on the Brier reward alone, without an accuracy reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dcpo.objectives.advantages import (
    Group,
    GroupScore,
    batch_scale,
    calibration_reward,
    hybrid_target,
    normalize,
)
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import ObjectiveConfig, Options


def score_group(group: Group, options: Options) -> GroupScore:
    """R_c,i = -(c_i - R_i)^2, normalised; on all tokens (``tokens: all``) or on the confidence tokens alone."""
    target = hybrid_target(group.correct, options)
    R_c = calibration_reward(group, target, options)
    A_c = normalize(R_c, options.advantage_normalization.confidence, options)
    A_r = A_c if options.tokens == "all" else np.zeros_like(A_c)
    return GroupScore(target, R_c.copy(), R_c, A_r, A_c)


def scale_batch(A_r: np.ndarray, A_c: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """One reward, so one scale for all tokens (``batch_std``)."""
    scale = batch_scale(A_c, options)
    return A_r / scale, A_c / scale


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """The label is the response's own, the score is Brier."""
    return {"lam": 0.0, "calibration_loss": "brier"}


METHOD = Method(score_group, defaults=defaults, scale_batch=scale_batch)
