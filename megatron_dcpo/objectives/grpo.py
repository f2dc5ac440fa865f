"""GRPO: the answer's reward alone, on every token (the paper's baseline;
docs/algorithms.md#2-methods).
"""

from __future__ import annotations

import numpy as np

from megatron_dcpo.objectives.advantages import Scores, shared_advantage
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import (
    CLIPPED_LOSS,
    COMMON,
    REASONING_ADVANTAGE,
    ObjectiveConfig,
)


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return A_i = (R_i - mean R) / (std R + eps) on all tokens. No target, no calibration reward,
    no format term.
    """
    nothing = np.full_like(R, np.nan)
    return shared_advantage(target=nothing, rewards=R.copy(), R_c=nothing, options=options)


METHOD = Method(score_group, reads=COMMON | CLIPPED_LOSS | REASONING_ADVANTAGE)
