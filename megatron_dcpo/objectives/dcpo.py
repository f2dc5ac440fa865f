"""DCPO: decoupled calibration policy optimisation (paper, method section; algorithms 1.4 to 1.6).

DCPO-I is ``lam: 0`` (each response its own label), DCPO-G is ``lam: 1`` (the group accuracy for all).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dcpo.objectives.advantages import (
    LEAST_BATCH_RMS,
    SCORES,
    Group,
    GroupScore,
    batch_scale,
    calibration_reward,
    correctness_reward,
    hybrid_target,
    normalize,
)
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import ObjectiveConfig, Options
from megatron_dcpo.types import DecimalToken, DigitScores, Judgement


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
    judgements: Sequence[Judgement], targets: np.ndarray, options: Options
) -> list[tuple[DigitScores, ...]]:
    """``confidence_gradient: digits``: S(c with other digits here, t_i) for every choice; the others stay as sampled."""
    if options.confidence_gradient == "sampled":
        return [()] * len(judgements)
    found = [
        [(token, all_choices(judgement.confidence, token, target, options)) for token in judgement.decimals]
        for judgement, target in zip(judgements, targets, strict=True)
    ]
    scale = place_scales(found, options)
    return [
        tuple(
            DigitScores(token.position, token.width, scores / scale[token.place, token.width]) for token, scores in row
        )
        for row in found
    ]


def all_choices(confidence: float | None, token: DecimalToken, target: float, options: Options) -> np.ndarray:
    """The score of ``confidence`` with each of the choices in the place of ``token``, float64 [10 ** width]."""
    assert confidence is not None  # only a valid confidence has decimals
    c = np.clip(confidence + (np.arange(10**token.width) - token.value) / 10.0**token.place, 0, 1)
    return SCORES[options.calibration_loss](c, np.full_like(c, target), options.score_clamp)


def place_scales(
    found: Sequence[Sequence[tuple[DecimalToken, np.ndarray]]], options: Options
) -> dict[tuple[int, int], float]:
    """What divides the scores of each (place, width), with ``batch_std``; 1 otherwise.

    The root mean square of the centred scores over the mini-batch and all choices, at least ``LEAST_BATCH_RMS``. Hundredths
    are worth a tenth of what tenths are and less: on one scale hardly anything would be left to train them.
    """
    variances: dict[tuple[int, int], list[float]] = {}
    for token, scores in itertools.chain.from_iterable(found):
        variances.setdefault((token.place, token.width), []).append(float(scores.var()))
    if options.advantage_normalization.confidence != "batch_std":
        return dict.fromkeys(variances, 1.0)
    return {place: max(math.sqrt(np.mean(values)), LEAST_BATCH_RMS) for place, values in variances.items()}


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """``dcpo_proper``: the gradient over all digits has less noise, and calibrates at a third of the weight (docs/lab)."""
    all_digits = config.preset == "dcpo_proper" and config.confidence_gradient != "sampled"
    return {"weight_confidence": 0.35} if all_digits else {}


METHOD = Method(score_group, defaults=defaults, scale_batch=scale_batch, score_digits=score_digits)
