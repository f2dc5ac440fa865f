"""DCPO without decoupling (the paper's ablation "w/o decoupled optimisation"; docs/algorithms.md#2-methods)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dcpo.objectives.advantages import (
    Group,
    GroupScore,
    by_group,
    calibration_reward,
    correctness_reward,
    hybrid_target,
    shared_advantage,
)
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import (
    CALIBRATION_REWARD,
    CLIPPED_LOSS,
    COMMON,
    REASONING_ADVANTAGE,
    ObjectiveConfig,
)


def score_group(group: Group, options: ObjectiveConfig) -> GroupScore:
    """r_i = R_i + w * R_c,i with DCPO's target; one GRPO advantage of r for all tokens."""
    target = hybrid_target(group.correct, options)
    R_c = calibration_reward(group, target, options)
    return shared_advantage(target, correctness_reward(group, options) + options.w * R_c, R_c, options)


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """The released code weighs its squared error by 0.5."""
    return {"w": 0.5} if config.preset == "verl_compat" else {}


OPTIONS = COMMON | CLIPPED_LOSS | CALIBRATION_REWARD | REASONING_ADVANTAGE | {"w"}
METHOD = Method(by_group(score_group), options=OPTIONS, defaults=defaults)
