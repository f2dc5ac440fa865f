"""A group of G responses to the same prompt: the target of the confidence, the rewards, the
normalized advantages.

Every score of a stated confidence is scaled to [-1, 0], where 0 is best, so that the default
penalty of -1 for a malformed confidence is never better than an honest answer under any score.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_dcpo.objectives.options import ConfidenceNormalization, ObjectiveConfig
from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING, Judgement

# Advantages of the confidence with a smaller root mean square are not scaled up further.
MIN_BATCH_RMS = 0.01
# Rewards closer than this count as equal: rounding must not become an advantage.
REWARD_TOLERANCE = 1e-6
# Advantages below this count as 0; the smallest that a reward can make is a few 1e-8.
ADVANTAGE_TOLERANCE = 1e-9
SCORE_CLAMP = 0.01  # of the confidence in the logarithmic score
MAX_STATED = 1e6  # a raw number has no bound; its square must stay finite
SENTINEL = -1.0  # the released code's confidence for a response that states none

# target, R, R_c, A_r, A_c: float64 [G] each
Scores = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def hybrid_target(R: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """Return t_i = lam * Rt + (1 - lam) * R_i, float64 [G], where Rt is the group's accuracy over
    all responses, with malformed ones (docs/algorithms.md#3-rewards).
    """
    return options.lam * R.mean() + (1 - options.lam) * R


def normalize(
    rewards: np.ndarray, how: ConfidenceNormalization, options: ObjectiveConfig
) -> np.ndarray:
    """Return A_i = (x_i - mean x) / (std x + eps), float64 [G] (docs/algorithms.md#4-advantages).

    ``mean`` does not divide, ``none`` returns x itself, and ``batch_std`` does not divide yet, see
    :func:`batch_scale`.

    A group of identical rewards gives exactly 0, because in float32 eight equal rewards can have a
    std of 3e-8.
    """
    x = np.asarray(rewards, dtype=np.float64)
    if how == "none":
        return x.copy()
    if np.ptp(x) < REWARD_TOLERANCE:
        return np.zeros_like(x)
    centered = x - x.mean()
    if how == "std":
        return divided_by_spread(centered, options)
    return centered


def divided_by_spread(x: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """Return x_i / (s + eps), float64 [G], where s = sqrt(sum_i x_i^2 / (G - ddof)).

    Of rewards without their mean, s is their standard deviation. Advantages whose mean is not 0
    are divided by their size, and not by a standard deviation that vanishes where they are equal. A
    group without a number of at least ``REWARD_TOLERANCE`` gives exactly 0.
    """
    if np.abs(x).max(initial=0.0) < REWARD_TOLERANCE:
        return np.zeros_like(x)
    spread = np.sqrt(np.sum(np.square(x)) / max(len(x) - options.ddof, 1))
    return x / (spread + options.eps)


def has_signal(advantages: np.ndarray) -> np.ndarray:
    """Return which advantages are other than 0 by more than rounding, bool in their shape: where a
    formula gives 0, float64 may leave 1e-15.
    """
    return np.abs(advantages) >= ADVANTAGE_TOLERANCE


def batch_scale(A_c: np.ndarray) -> float:
    """Return the divisor of the advantages ``A_c`` [N] of a whole mini-batch with ``batch_std``.

    It is their root mean square, at least ``MIN_BATCH_RMS``. One number for all groups changes the
    length of the expected gradient and not its direction, so a proper score stays proper. The std
    of each group does not allow that.
    """
    return max(float(np.sqrt(np.mean(np.square(A_c)))), MIN_BATCH_RMS)


def shared_advantage(
    target: np.ndarray, rewards: np.ndarray, R_c: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return the scores with one scalar reward and one advantage on all tokens, as in GRPO and
    every method built on it.
    """
    advantage = normalize(rewards, options.advantage_normalization_reasoning, options)
    return target, rewards, R_c, advantage, advantage


def l1(c: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return -|c - t| (the paper's hybrid reward). It is not proper: its optimum is a median of t.
    At lam = 1, where t is the accuracy of G responses, that is within 1/G of E[t]; at lam = 0 it is
    0 or 1.
    """
    return -np.abs(c - target)


def brier(c: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return -(c - t)^2, strictly proper for E[t]."""
    return -np.square(c - target)


def log(c: np.ndarray, target: np.ndarray, clamp: float = SCORE_CLAMP) -> np.ndarray:
    """Return t log c + (1 - t) log(1 - c) with c in [clamp, 1 - clamp], divided by -log(clamp) so
    that the worst is -1.
    """
    c = np.clip(c, clamp, 1 - clamp)
    return (target * np.log(c) + (1 - target) * np.log1p(-c)) / -np.log(clamp)


def spherical(c: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return (t c + (1 - t)(1 - c)) / sqrt(c^2 + (1 - c)^2) - 1, strictly proper for E[t]."""
    return (target * c + (1 - target) * (1 - c)) / np.hypot(c, 1 - c) - 1


SCORING_RULES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "l1": l1,
    "brier": brier,
    "log": log,
    "spherical": spherical,
}


def calibration_reward(c: np.ndarray, target: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """Return R_c, float64 [G]: the score of the confidence. For a malformed confidence it depends
    on ``malformed_placement``.

    ``confidence`` and ``both``: the constant ``malformed_penalty``, for right and wrong answers.
    ``reasoning``: the mean of the well-formed R_c, hence no confidence advantage; the penalty is in
    R instead. ``sentinel``: the score of the number that replaces it, which ``c`` already has.
    """
    well_formed = ~np.isnan(c)
    score = SCORING_RULES[options.calibration_loss]
    rewards = score(np.where(well_formed, c, 0.5), target)
    penalty = options.malformed_penalty
    if options.malformed_placement == "reasoning":
        if well_formed.any():
            penalty = float(rewards[well_formed].mean())
        else:
            penalty = 0.0
    return np.where(well_formed, rewards, penalty)


def scored_confidence(judgement: Judgement, options: ObjectiveConfig) -> float:
    """Return the confidence that is scored. It is NaN if malformed, unless ``malformed_placement``
    is ``sentinel``, as in the released code: then it is the number as written, or -1 if there is
    none.
    """
    if judgement.confidence is not None:
        return judgement.confidence
    if options.malformed_placement != "sentinel":
        return np.nan
    if judgement.stated is None:
        return SENTINEL
    return float(np.clip(judgement.stated, -MAX_STATED, MAX_STATED))


def correctness_reward(R: np.ndarray, c: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """Return R, float64 [G]: 1 for a right answer and 0 otherwise, plus the format penalty if it is
    placed on the reasoning.
    """
    if options.malformed_placement in ("reasoning", "both"):
        return R + np.where(np.isnan(c), options.malformed_penalty, 0.0)
    return R.copy()


def block_ids(judgement: Judgement, options: ObjectiveConfig) -> np.ndarray:
    """Return the block of each response token, int8 [T] (docs/algorithms.md#4-advantages)."""
    blocks = np.full(judgement.length, BLOCK_REASONING, np.int8)
    blocks[confidence_start(judgement, options) :] = BLOCK_CONFIDENCE
    return blocks


def confidence_start(judgement: Judgement, options: ObjectiveConfig) -> int:
    """Return the first token of the confidence block. ``fallback`` matters only for a response
    without a marker.

    The splitter gives such a response its EOS as block (``eos``), and nothing if it was truncated.
    With ``marker_block: reasoning`` the block begins after the marker: writing the marker means to
    stop reasoning.
    """
    no_marker = judgement.status == "missing" or judgement.boundary == judgement.length
    if no_marker and options.fallback == "last_two":
        return max(judgement.length - 2, 0)
    if no_marker and options.fallback == "none":
        return judgement.length
    if options.marker_block == "reasoning" and judgement.marker_end is not None:
        return judgement.marker_end
    assert judgement.boundary is not None, "a response is trained on as token ids, not as text"
    return judgement.boundary
