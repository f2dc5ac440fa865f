"""DCPO without decoupling (paper, ablation "w/o decoupled optimisation"; inferred, algorithms 3.5)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dcpo.objectives.advantages import (
    Group,
    GroupScore,
    calibration_reward,
    correctness_reward,
    hybrid_target,
    shared_advantage,
)
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import ObjectiveConfig, Options


def score_group(group: Group, options: Options) -> GroupScore:
    """r_i = R_i + w * R_c,i with DCPO's target; one GRPO advantage of r for all tokens."""
    target = hybrid_target(group.correct, options)
    R_c = calibration_reward(group, target, options)
    return shared_advantage(target, correctness_reward(group, options) + options.w * R_c, R_c, options)


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """The released code weighs its squared error by 0.5."""
    return {"w": 0.5} if config.preset == "verl_compat" else {}


METHOD = Method(score_group, defaults=defaults)
