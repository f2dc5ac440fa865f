"""GRPO: the answer's reward alone, on every token (the paper's baseline; docs/algorithms.md#2-methods)."""

from __future__ import annotations

import numpy as np

from megatron_dcpo.objectives.advantages import Group, GroupScore, by_group, shared_advantage
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import CLIPPED_LOSS, COMMON, REASONING_ADVANTAGE, ObjectiveConfig


def score_group(group: Group, options: ObjectiveConfig) -> GroupScore:
    """A_i = (R_i - mean R) / (std R + eps) on all tokens. No target, no calibration reward, no format term."""
    nothing = np.full_like(group.correct, np.nan)
    return shared_advantage(nothing, group.correct.copy(), nothing, options)


METHOD = Method(by_group(score_group), options=COMMON | CLIPPED_LOSS | REASONING_ADVANTAGE)
