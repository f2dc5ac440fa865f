"""DCPO: decoupled calibration policy optimisation (paper, method section; algorithms 1.4 to 1.6).

DCPO-I is ``lam: 0`` (each response its own label), DCPO-G is ``lam: 1`` (the group accuracy for all).
"""

from __future__ import annotations

from megatron_dcpo.objectives.advantages import Group, GroupScore, hybrid_target, normalize
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import Options
from megatron_dcpo.objectives.scores import calibration_reward, correctness_reward


def score_group(group: Group, options: Options) -> GroupScore:
    """Two rewards, two advantages, each with the statistics of its own.

    t_i = lam * Rt + (1 - lam) * R_i;  R_c,i = -|c_i - t_i|;
    A_r = normalised R, on the reasoning tokens;  A_c = normalised R_c, on the confidence tokens.
    """
    target = hybrid_target(group.correct, options)
    R = correctness_reward(group, options)
    R_c = calibration_reward(group, target, options)
    A_r = normalize(R, options.advantage_normalization.reasoning, options)
    A_c = normalize(R_c, options.advantage_normalization.confidence, options)
    return GroupScore(target, R, R_c, A_r, A_c)


METHOD = Method(score_group)
