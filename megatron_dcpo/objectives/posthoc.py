"""Post-hoc calibration of a GRPO checkpoint (the paper's ablation "w/o on-policy training"; docs/algorithms.md#2-methods).

Start from a GRPO checkpoint and train on the Brier reward alone, without an accuracy reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dcpo.objectives.advantages import (
    Group,
    GroupScore,
    calibration_reward,
    hybrid_target,
    normalize,
    one_scale,
)
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import (
    CALIBRATION_REWARD,
    CLIPPED_LOSS,
    COMMON,
    CONFIDENCE_ADVANTAGE,
    ObjectiveConfig,
)


def score_group(group: Group, options: ObjectiveConfig) -> GroupScore:
    """R_c,i = -(c_i - R_i)^2, normalised; on all tokens (``tokens: all``) or on the confidence tokens alone."""
    target = hybrid_target(group.correct, options)
    R_c = calibration_reward(group, target, options)
    A_c = normalize(R_c, options.advantage_normalization_confidence, options)
    A_r = A_c if options.tokens == "all" else np.zeros_like(A_c)
    return GroupScore(target, R_c.copy(), R_c, A_r, A_c)


def score(groups: Sequence[Group], options: ObjectiveConfig) -> list[GroupScore]:
    """Each group, then one scale for all of them (``batch_std``): one reward, so all tokens have it."""
    return one_scale([score_group(group, options) for group in groups], options, "A_r", "A_c")


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """The label is the response's own, the score is Brier."""
    return {"lam": 0.0, "calibration_loss": "brier"}


OPTIONS = COMMON | CLIPPED_LOSS | CALIBRATION_REWARD | CONFIDENCE_ADVANTAGE | {"tokens"}
METHOD = Method(score, options=OPTIONS, defaults=defaults)
