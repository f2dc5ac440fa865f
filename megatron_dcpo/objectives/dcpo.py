"""DCPO: decoupled calibration policy optimisation (paper, method section; algorithms 1.4 to 1.6).

DCPO-I is ``lam: 0`` (each response its own label), DCPO-G is ``lam: 1`` (the group accuracy for all).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dcpo.objectives.advantages import Group, GroupScore, batch_scale, hybrid_target, normalize
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import Options
from megatron_dcpo.objectives.scores import SCORES, calibration_reward, correctness_reward
from megatron_dcpo.types import DigitScores, Judgement


def score_group(group: Group, options: Options) -> GroupScore:
    """Two rewards, two advantages, each with the statistics of its own.

    t_i = lam * Rt + (1 - lam) * R_i;  R_c,i = -|c_i - t_i|;
    A_r = normalised R, on the reasoning tokens;  A_c = normalised R_c, on the confidence tokens.
    """
    target = hybrid_target(group.correct, options)
    R = correctness_reward(group, options)
    R_c = calibration_reward(group, target, options)
    A_r = normalize(R, options.advantage_normalization.reasoning, options)
    if options.confidence_baseline == "counterfactual":
        A_c = counterfactual_advantage(group, target, options)
    else:
        A_c = normalize(R_c, options.advantage_normalization.confidence, options)
    return GroupScore(target, R, R_c, A_r, A_c)


def counterfactual_advantage(group: Group, target: np.ndarray, options: Options) -> np.ndarray:
    """A_c,i = S(c_i, t_i) - 1/(G-1) sum_{j != i} S(c_j, t_i), float64 [G].

    The score is a known function of confidence and target, so what the other responses' confidences would have earned
    on *this* response's target can be computed. They were sampled independently of c_i, so the expected gradient is the
    group baseline's; but the part of R_c that comes from t_i and not from the choice of c_i cancels.
    """
    G = len(target)
    scores = np.stack([calibration_reward(group, np.full(G, t), options) for t in target])  # [i, j]: c_j on t_i
    own = np.diagonal(scores)
    A_c = own - (scores.sum(axis=1) - own) / (G - 1)
    if options.advantage_normalization.confidence == "std":
        return A_c / (A_c.std(ddof=options.ddof) + options.eps)
    return A_c


def scale_batch(A_r: np.ndarray, A_c: np.ndarray, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """The confidence's advantages on one scale over the mini-batch (``batch_std``); the accuracy's as they are."""
    return A_r, A_c / batch_scale(A_c, options)


def score_digits(
    judgements: Sequence[Judgement], targets: np.ndarray, A_c: np.ndarray, options: Options
) -> list[tuple[DigitScores, ...]]:
    """``confidence_gradient: digits``: S(c with other digits here, t_i) for every choice, on the scale of A_c.

    The later digits stay as they were sampled: they are a tenth of this one's weight, and hardly depend on it.
    """
    if options.confidence_gradient == "sampled":
        return [()] * len(judgements)
    score, scale = SCORES[options.calibration_loss], batch_scale(A_c, options)

    def all_choices(judgement: Judgement, target: float) -> tuple[DigitScores, ...]:
        found = []
        for token in judgement.decimals:
            assert judgement.confidence is not None  # only a valid confidence has decimals
            shift = (np.arange(10**token.width) - token.value) / 10.0**token.place
            c = np.clip(judgement.confidence + shift, 0, 1)
            scores = score(c, np.full_like(c, target), options.score_clamp) / scale
            found.append(DigitScores(token.position, token.width, scores))
        return tuple(found)

    return [all_choices(judgement, target) for judgement, target in zip(judgements, targets, strict=True)]


METHOD = Method(score_group, scale_batch=scale_batch, score_digits=score_digits)
