"""Options that shape length, entropy and the share of the confidence in addition to a method:
DAPO's soft length penalty, Skywork-OR1's adaptive entropy coefficient, and a weight that keeps the
confidence's gradient small against the reasoning's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dcpo.objectives.advantages import Scores, normalize
from megatron_dcpo.objectives.options import ObjectiveConfig

# Change of the coefficient of the entropy after a step, as in Skywork-OR1.
ENTROPY_DELTA = 0.005


def with_length_penalty(
    scores: Sequence[np.ndarray], lengths: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return the scores with the reward R + P and its normalization as A_r; also as A_c, if that is
    the same array as A_r.

    P = 0 up to max_response_length - overlong_buffer tokens, then falls linearly to
    -overlong_penalty at max_response_length (DAPO, Yu et al. 2025, equation 13). Target and R_c do
    not change.
    """
    target, R, R_c, A_r, A_c = scores
    over = lengths - (options.max_response_length - options.overlong_buffer)
    R = R - options.overlong_penalty * np.clip(over / options.overlong_buffer, 0.0, 1.0)
    shaped = normalize(R, options.advantage_normalization_reasoning, options)
    if A_c is A_r:
        A_c = shaped
    return target, R, R_c, shaped, A_c


def adapted_entropy_coef(
    coef: float, entropy: float, options: ObjectiveConfig
) -> tuple[float, float]:
    """Return the next coefficient of the reasoning's entropy after a step with mean ``entropy``
    [nats], and the coefficient that acts.

    c' = max(c + ENTROPY_DELTA, 0) below the target and max(c - ENTROPY_DELTA, 0) above; c' acts
    while entropy <= target (Skywork-OR1, He et al. 2025, section 4).
    """
    if entropy <= options.entropy_target:
        coef = max(coef + ENTROPY_DELTA, 0.0)
        return coef, coef
    return max(coef - ENTROPY_DELTA, 0.0), 0.0
