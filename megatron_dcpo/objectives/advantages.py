"""One group of G responses to the same prompt: its arrays, the confidence target, its rewards, the normalised advantage.

Every score of a stated confidence is scaled to [-1, 0], 0 the best, so that the default penalty of -1 for a malformed
confidence is never better than an honest answer, whichever score is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives.options import ConfidenceNormalization, ObjectiveConfig
from megatron_dcpo.types import Judgement

MIN_BATCH_RMS = 0.01  # of the confidence's advantages: what is smaller is not blown up further
REWARD_TOLERANCE = 1e-6  # rewards closer than this are the same reward: rounding must not become an advantage
SENTINEL = -1.0  # the released code's confidence of a response that states none
MAX_STATED = 1e6  # a raw number has no bound; its square must stay finite


@dataclass(frozen=True)
class Group:
    """The G responses of one prompt, float64 [G] each; NaN where there is nothing.

    ``confidence`` of the well-formed responses; ``stated`` is the number a malformed one wrote all the same;
    ``old_logprobs`` are the [T_i] log-probs by the policy that starts the update, where the method asks for them.
    """

    correct: np.ndarray
    confidence: np.ndarray
    stated: np.ndarray
    old_logprobs: tuple[np.ndarray, ...] | None = None

    @property
    def well_formed(self) -> np.ndarray:
        """bool [G]."""
        return ~np.isnan(self.confidence)


@dataclass(frozen=True)
class GroupScore:
    """What a method makes of a group, float64 [G] each.

    ``R`` is the reward behind ``A_r`` (for scalar methods the whole reward), ``R_c`` the calibration reward (NaN
    where the method has none), ``target`` what the confidence is compared with.
    """

    target: np.ndarray
    R: np.ndarray
    R_c: np.ndarray
    A_r: np.ndarray
    A_c: np.ndarray


# How a method scores a mini-batch: its groups in, one score per group out.
ScoreMiniBatch = Callable[[Sequence[Group], ObjectiveConfig], list[GroupScore]]


def make_group(judgements: Sequence[Judgement], old_logprobs: tuple[np.ndarray, ...] | None = None) -> Group:
    """Collect one prompt's judgements. Raises :class:`UserError` for fewer than two or an impossible confidence."""
    if len(judgements) < 2:
        raise UserError(
            f"prompt {judgements[0].prompt_id!r} has one response; a group needs at least 2 (rollout.group_size)"
        )
    for judgement in judgements:
        c = judgement.confidence
        if (judgement.status == "ok") != (c is not None) or (c is not None and not 0 <= c <= 1):
            raise UserError(
                f"prompt {judgement.prompt_id!r}: status {judgement.status!r} with confidence {c}; "
                "a number in [0, 1] goes with 'ok', and only with it"
            )
    return Group(
        correct=np.array([j.correct for j in judgements], dtype=np.float64),
        confidence=np.array([np.nan if j.confidence is None else j.confidence for j in judgements]),
        stated=np.array([np.nan if j.stated is None else j.stated for j in judgements]),
        old_logprobs=old_logprobs,
    )


def hybrid_target(correct: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """t_i = lam * Rt + (1 - lam) * R_i, Rt the group accuracy over all responses, malformed ones too
    (docs/algorithms.md#3-rewards)."""
    accuracy = correct.mean()
    if options.leave_one_out:
        accuracy = (correct.sum() - correct) / (len(correct) - 1)
    return options.lam * accuracy + (1 - options.lam) * correct


def normalize(rewards: np.ndarray, how: ConfidenceNormalization, options: ObjectiveConfig) -> np.ndarray:
    """A_i = (x_i - mean x) / (std x + eps), float64 [G] (docs/algorithms.md#4-advantages).

    ``mean``: not divided; ``none``: x itself; ``batch_std``: not divided yet, see :func:`batch_scale`.

    A group of identical rewards gives exactly 0: in float32 eight equal rewards can have a std of 3e-8.
    """
    x = np.asarray(rewards, dtype=np.float64)
    if how == "none":
        return x.copy()
    if np.ptp(x) < REWARD_TOLERANCE:
        return np.zeros_like(x)
    centred = x - x.mean()
    return centred / (x.std(ddof=options.ddof) + options.eps) if how == "std" else centred


def batch_scale(A_c: np.ndarray, options: ObjectiveConfig) -> float:
    """The divisor of the confidence's advantages of a whole mini-batch, ``A_c`` [N], with ``batch_std``; 1 otherwise.

    Their root mean square, at least ``MIN_BATCH_RMS``. One number for all groups changes the length of the expected
    gradient and not its direction, so a proper score stays proper, which a group's own std does not allow.
    """
    if options.advantage_normalization_confidence != "batch_std" or not len(A_c):
        return 1.0
    return max(float(np.sqrt(np.mean(np.square(A_c)))), MIN_BATCH_RMS)


def one_scale(scores: list[GroupScore], options: ObjectiveConfig, *advantages: str) -> list[GroupScore]:
    """The groups of a mini-batch with their ``advantages`` (``A_r``, ``A_c``) divided by :func:`batch_scale` of A_c."""
    if options.advantage_normalization_confidence != "batch_std" or not scores:
        return scores
    scale = batch_scale(np.concatenate([score.A_c for score in scores]), options)
    return [replace(score, **{name: getattr(score, name) / scale for name in advantages}) for score in scores]


def by_group(score_group: Callable[[Group, ObjectiveConfig], GroupScore]) -> ScoreMiniBatch:
    """A method whose groups do not depend on each other."""
    return lambda groups, options: [score_group(group, options) for group in groups]


def shared_advantage(target: np.ndarray, rewards: np.ndarray, R_c: np.ndarray, options: ObjectiveConfig) -> GroupScore:
    """One scalar reward, one advantage on all tokens: GRPO and everything built on it."""
    advantage = normalize(rewards, options.advantage_normalization_reasoning, options)
    return GroupScore(target, rewards, R_c, advantage, advantage)


def l1(c: np.ndarray, target: np.ndarray, clamp: float = 0.0) -> np.ndarray:
    """-|c - t| (paper, hybrid reward). Not proper: its optimum is a median of t, so it is honest only at lam = 1."""
    return -np.abs(c - target)


def brier(c: np.ndarray, target: np.ndarray, clamp: float = 0.0) -> np.ndarray:
    """-(c - t)^2, strictly proper for E[t]."""
    return -np.square(c - target)


def log(c: np.ndarray, target: np.ndarray, clamp: float = 0.01) -> np.ndarray:
    """t log c + (1 - t) log(1 - c) with c in [clamp, 1 - clamp], divided by -log(clamp) so that the worst is -1."""
    c = np.clip(c, clamp, 1 - clamp)
    return (target * np.log(c) + (1 - target) * np.log1p(-c)) / -np.log(clamp)


def spherical(c: np.ndarray, target: np.ndarray, clamp: float = 0.0) -> np.ndarray:
    """(t c + (1 - t)(1 - c)) / sqrt(c^2 + (1 - c)^2) - 1, strictly proper for E[t]."""
    return (target * c + (1 - target) * (1 - c)) / np.hypot(c, 1 - c) - 1


SCORES: dict[str, Callable[[np.ndarray, np.ndarray, float], np.ndarray]] = {
    "l1": l1,
    "brier": brier,
    "log": log,
    "spherical": spherical,
}


def calibration_reward(group: Group, target: np.ndarray, options: ObjectiveConfig) -> np.ndarray:
    """R_c, float64 [G]: the score of the confidence, and for a malformed one what ``malformed_placement`` says.

    ``confidence`` and ``both``: the constant ``malformed_penalty`` (right and wrong answers alike).
    ``reasoning``: the mean of the well-formed R_c, hence no confidence advantage; the penalty is in R instead.
    ``sentinel``: the released code, c := the number as written, or -1 when there is none.
    """
    score = SCORES[options.calibration_loss]
    if options.malformed_placement == "sentinel":
        stated = np.where(np.isnan(group.stated), SENTINEL, np.clip(group.stated, -MAX_STATED, MAX_STATED))
        return score(np.where(group.well_formed, group.confidence, stated), target, options.score_clamp)
    rewards = score(np.where(group.well_formed, group.confidence, 0.5), target, options.score_clamp)
    penalty = options.malformed_penalty
    if options.malformed_placement == "reasoning":
        penalty = float(rewards[group.well_formed].mean()) if group.well_formed.any() else 0.0
    return np.where(group.well_formed, rewards, penalty)


def correctness_reward(group: Group, options: ObjectiveConfig) -> np.ndarray:
    """R, float64 [G]: 1 for a right answer, else 0; plus the format penalty where it is placed on the reasoning."""
    if options.malformed_placement in ("reasoning", "both"):
        return group.correct + np.where(group.well_formed, 0.0, options.malformed_penalty)
    return group.correct.copy()
