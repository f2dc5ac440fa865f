"""DCPO: decoupled calibration policy optimization (the paper's method;
docs/algorithms.md#2-methods).

DCPO-I is ``lam: 0`` (each response its own label), DCPO-G is ``lam: 1`` (the group accuracy for
all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_dcpo.objectives.advantages import (
    Scores,
    calibration_reward,
    correctness_reward,
    divided_by_spread,
    has_signal,
    hybrid_target,
    normalize,
)
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import (
    CALIBRATION_REWARD,
    CLIPPED_LOSS,
    COMMON,
    CONFIDENCE_ADVANTAGE,
    REASONING_ADVANTAGE,
    ObjectiveConfig,
)


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return two rewards and two advantages, each normalized with its own statistics.

    t_i = lam * Rt + (1 - lam) * R_i;  R_c,i = -|c_i - t_i|;
    A_r = normalized R, on the reasoning tokens;  A_c = normalized R_c, on the confidence tokens.
    """
    target = hybrid_target(R, options)
    reward = correctness_reward(R, c, options)
    R_c = calibration_reward(c, target, options)
    A_r = normalize(reward, options.advantage_normalization_reasoning, options)
    if options.options["confidence_baseline"] == "counterfactual":
        A_c = counterfactual_advantage(c, target, options)
    else:
        A_c = normalize(R_c, options.advantage_normalization_confidence, options)
    return target, reward, R_c, A_r, A_c


def counterfactual_advantage(
    c: np.ndarray, target: np.ndarray, options: ObjectiveConfig
) -> np.ndarray:
    """Return A_c,i = S(c_i, t_i) - 1/(G-1) sum_{j != i} S(c_j, t_i), float64 [G].

    The score is a known function of confidence and target, so one can compute what the confidences
    of the other responses would have earned on the target of *this* response. They were sampled
    independently of c_i, so the expected gradient is that of the group baseline; but the part of
    R_c that comes from t_i and not from the choice of c_i cancels.
    """
    G = len(target)
    # [i, j]: the score of c_j on t_i
    scores = np.stack([calibration_reward(c, np.full(G, t), options) for t in target])
    earned = np.diagonal(scores)
    baseline = (scores.sum(axis=1) - earned) / (G - 1)
    A_c = earned - baseline
    A_c[~has_signal(A_c)] = 0.0
    if options.advantage_normalization_confidence == "std":
        return divided_by_spread(A_c, options)
    return A_c


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Return the baseline with less noise for the preset with a proper score."""
    if config.preset == "dcpo_proper":
        return {"confidence_baseline": "counterfactual"}
    return {}


METHOD = Method(
    score_group=score_group,
    reads=COMMON | CLIPPED_LOSS | CALIBRATION_REWARD | REASONING_ADVANTAGE | CONFIDENCE_ADVANTAGE,
    own_options={"confidence_baseline": ("group", "counterfactual")},
    meanings={
        "confidence_baseline": "What R_c is compared with: the R_c of the group, or the scores "
        "that the group's confidences "
        "would have had on its target."
    },
    defaults=defaults,
)
