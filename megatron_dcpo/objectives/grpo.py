"""GRPO: the answer's reward alone, on every token (paper, baseline; algorithms 3.1)."""

from __future__ import annotations

import numpy as np

from megatron_dcpo.objectives.advantages import Group, GroupScore, shared_advantage
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import Options


def score_group(group: Group, options: Options) -> GroupScore:
    """A_i = (R_i - mean R) / (std R + eps) on all tokens. No target, no calibration reward, no format term."""
    nothing = np.full_like(group.correct, np.nan)
    return shared_advantage(nothing, group.correct.copy(), nothing, options)


METHOD = Method(score_group)
