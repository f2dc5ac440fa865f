"""DCPO without decoupling (the paper's ablation "w/o decoupled optimization";
docs/algorithms.md#2-methods).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dcpo.objectives.advantages import (
    Scores,
    calibration_reward,
    correctness_reward,
    hybrid_target,
    shared_advantage,
)
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import (
    CALIBRATION_REWARD,
    CLIPPED_LOSS,
    COMMON,
    REASONING_ADVANTAGE,
    ObjectiveConfig,
)


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return the scores of r_i = R_i + w * R_c,i with DCPO's target: one GRPO advantage of r for
    all tokens.
    """
    target = hybrid_target(R, options)
    R_c = calibration_reward(c, target, options)
    return shared_advantage(
        target=target,
        rewards=correctness_reward(R, c, options) + options.options["w"] * R_c,
        R_c=R_c,
        options=options,
    )


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Return the weight of the released code, which weighs its squared error by 0.5."""
    if config.preset == "verl_compat":
        return {"w": 0.5}
    return {}


READS = COMMON | CLIPPED_LOSS | CALIBRATION_REWARD | REASONING_ADVANTAGE
OWN_OPTIONS = {"w": 1.0}
MEANINGS = {"w": "Factor of the calibration reward in the sum of both rewards."}
METHOD = Method(
    score_group=score_group,
    reads=READS,
    own_options=OWN_OPTIONS,
    meanings=MEANINGS,
    defaults=defaults,
)
