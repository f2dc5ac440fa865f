"""Post-hoc calibration of a GRPO checkpoint (the paper's ablation "w/o on-policy training";
docs/algorithms.md#2-methods).

Start from a GRPO checkpoint and train on the Brier reward alone, without an accuracy reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dcpo.objectives.advantages import Scores, calibration_reward, hybrid_target, normalize
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import (
    CALIBRATION_REWARD,
    CLIPPED_LOSS,
    COMMON,
    CONFIDENCE_ADVANTAGE,
    ObjectiveConfig,
)


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return the normalized R_c,i = -(c_i - R_i)^2 on all tokens (``tokens: all``), or only on the
    confidence tokens.
    """
    target = hybrid_target(R, options)
    R_c = calibration_reward(c, target, options)
    A_c = normalize(R_c, options.advantage_normalization_confidence, options)
    if options.options["tokens"] == "all":
        A_r = A_c
    else:
        A_r = np.zeros_like(A_c)
    return target, R_c.copy(), R_c, A_r, A_c


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Return the response's own label as target, and Brier as score."""
    return {"lam": 0.0, "calibration_loss": "brier"}


METHOD = Method(
    score_group=score_group,
    # no reward for correctness, hence no signal of the reasoning by which groups could be chosen
    reads=(COMMON | CLIPPED_LOSS | CALIBRATION_REWARD | CONFIDENCE_ADVANTAGE) - {"block_groups"},
    own_options={"tokens": ("all", "confidence")},
    meanings={"tokens": "Tokens that the calibration reward trains."},
    defaults=defaults,
    batch_scaled=("A_r", "A_c"),  # one reward, so all tokens have it,
)
