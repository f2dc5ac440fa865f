"""A method: how a group of responses is scored, and the loss of a token.

    samples = method.score(samples)  # rewards, advantages, blocks and weights of every sample
    contributions, statistics = method.loss(batch, outputs)  # per token of a micro-batch

The plain sum of all contributions is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.objectives.advantages import (
    batch_scale,
    block_ids,
    scored_confidence,
)
from megatron_dcpo.objectives.options import CLIPPED_LOSS, COMMON, ObjectiveConfig
from megatron_dcpo.objectives.policy_loss import Stats, clipped_policy_loss
from megatron_dcpo.objectives.shaping import with_length_penalty
from megatron_dcpo.runtime.plugins import is_import_path, raised
from megatron_dcpo.types import (
    BLOCK_CONFIDENCE,
    BLOCK_NONE,
    BLOCK_REASONING,
    Judgement,
    MicroBatch,
    TokenOutputs,
    TrainingSample,
    replaced,
)

if TYPE_CHECKING:
    from torch import Tensor

SCORES = ("target", "R", "R_c", "A_r", "A_c")

# From a group's correctness R, confidence c (NaN if malformed) and mean log-prob, float64 [G] each,
# and the options to ``SCORES``, float64 [G] each: the target of the confidence, the reward behind
# A_r, the calibration reward (NaN if the method has none), and the advantages of the reasoning and
# of the confidence tokens.
ScoreGroup = Callable[
    [np.ndarray, np.ndarray, np.ndarray, ObjectiveConfig], Sequence[np.ndarray]
]
TokenLoss = Callable[
    [MicroBatch, TokenOutputs, ObjectiveConfig], "tuple[Tensor, Stats]"
]


def no_defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Leave every option to the preset."""
    return {}


@dataclass(frozen=True)
class Method:
    """What a file of this package (or a user's) declares; ``objectives.build_method`` adds the
    ``options``. It holds no state.

    score_group: see :data:`ScoreGroup`.
    token_loss: returns the contributions [n] of a micro-batch's tokens, and sums over them.
    reads: the names of the options that it reads; other options are refused if they are set.
    own_options: its own options with their defaults (the first of a tuple of choices), which are
        set under ``objective.options``; ``meanings`` has a sentence on each.
    defaults: its own values of options, which take precedence over the preset's.
    needs_old_logprobs: whether the score reads the mean log-prob of each response under the policy
        that sampled it.
    separable: whether a token's loss depends on the policy's outputs at that token alone.
    batch_scaled: the advantages that ``batch_std`` scales.
    abstention: whether R is NaN for a response that says it does not know.
    """

    score_group: ScoreGroup
    token_loss: TokenLoss = clipped_policy_loss
    reads: frozenset[str] = COMMON | CLIPPED_LOSS
    own_options: Mapping[str, Any] = field(default_factory=dict)
    meanings: Mapping[str, str] = field(default_factory=dict)
    defaults: Callable[[ObjectiveConfig], Mapping[str, Any]] = no_defaults
    needs_old_logprobs: bool = False
    separable: bool = True
    batch_scaled: tuple[str, ...] = ("A_c",)
    abstention: bool = False
    options: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    @property
    def loss_is_separable(self) -> bool:
        """Return whether :meth:`loss` may be called on some of a micro-batch's tokens, because it
        is a plain sum over them.
        """
        of_tokens = self.options.ratio == "token" and self.options.tis_level in (
            "none",
            "token",
        )
        return self.separable and of_tokens

    def loss(self, batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, Stats]:
        """Return per-token contributions [n] of a micro-batch, and statistics that add up over
        micro-batches and ranks. Raises :class:`UserError` if a user's loss fails.
        """
        name = self.options.name
        try:
            return self.token_loss(batch, outputs, self.options)
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            if not is_import_path(name):
                raise
            raise UserError(
                f"objective.name={name} failed in its loss: {raised(error)}"
            ) from error

    def check_scores(self) -> None:
        """Raise :class:`UserError` if the method cannot score a group of four responses of which
        two are right: better before a rollout than after it.
        """
        correct = np.array([1.0, 1.0, 0.0, 0.0])
        confidence = np.array([0.9, 0.6, 0.7, 0.2])
        logprob = np.array([-0.5, -0.7, -0.9, -1.1])
        self._scores_of_group(correct, confidence, logprob)

    def with_entropy_coef(self, coef: float) -> Method:
        """Return the method with another coefficient of the reasoning's entropy
        (``entropy_target``).
        """
        options = self.options.model_copy(update={"entropy_coef_reasoning": coef})
        return replace(self, options=options)

    def score(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples of a mini-batch with rewards, advantages, blocks and token weights.

        Groups are collected by prompt id, in any order; the denominators of the weights count all
        ``samples``. Raises :class:`UserError` for a group of one, ValueError if log-probs are
        missing.
        """
        scores = self.group_scores(samples)
        blocks = [blocks_of(sample, self.options) for sample in samples]
        weights = self.token_weights(samples, blocks)
        scored = []
        for index, sample in enumerate(samples):
            _, R, R_c, A_r, A_c = scores[:, index]
            scored.append(
                replaced(
                    sample,
                    R=float(R),
                    R_c=float(R_c),
                    advantages=_token_advantages(blocks[index], A_r, A_c),
                    block_ids=blocks[index],
                    weights=weights[index],
                )
            )
        return scored

    def group_scores(self, samples: Sequence[TrainingSample]) -> np.ndarray:
        """Return :data:`SCORES` of every sample, float64 [5, N]. Raises as :meth:`score` does."""
        judgements = [sample.judgement for sample in samples]
        groups: dict[str, list[int]] = {}
        for row, judgement in enumerate(judgements):
            groups.setdefault(judgement.prompt_id, []).append(row)
        for rows in groups.values():
            _check_group([judgements[row] for row in rows])
        R = np.array(
            [self._correctness(judgement) for judgement in judgements], np.float64
        )
        c = np.array(
            [scored_confidence(each, self.options) for each in judgements], np.float64
        )
        logprob = np.array(
            [self._mean_logprob(sample) for sample in samples], np.float64
        )
        lengths = np.array([judgement.length for judgement in judgements])
        scores = np.full((len(SCORES), len(samples)), np.nan)
        for rows in groups.values():
            of_group = self._scores_of_group(R[rows], c[rows], logprob[rows])
            if self.options.overlong_buffer:
                of_group = with_length_penalty(of_group, lengths[rows], self.options)
            scores[:, rows] = of_group
        if (
            self.options.advantage_normalization_confidence == "batch_std"
            and not np.isnan(R).all()
        ):
            order = np.concatenate(list(groups.values()))
            answered = order[~np.isnan(R[order])]
            scale = batch_scale(scores[SCORES.index("A_c"), answered])
            for name in self.batch_scaled:
                scores[SCORES.index(name)] /= scale
        return scores

    def _scores_of_group(
        self, R: np.ndarray, c: np.ndarray, logprob: np.ndarray
    ) -> Sequence[np.ndarray]:
        """Return :data:`SCORES` of a group, float64 [G] each. Raises :class:`UserError` if a user's
        method fails or returns something else.
        """
        name = self.options.name
        try:
            scores = self.score_group(R, c, logprob, self.options)
        except Exception as error:
            if not is_import_path(name):
                raise
            raise UserError(
                f"objective.name={name} failed to score a group: {raised(error)}"
            ) from error
        try:
            shapes = [np.asarray(each, np.float64).shape for each in scores]
        except (TypeError, ValueError) as error:
            shapes = [(one_line(error, 100),)]
        if shapes != [R.shape] * len(SCORES):
            raise UserError(
                f"objective.name={name}: score_group must return {len(SCORES)} arrays "
                f"({', '.join(SCORES)}) with a number for each of the {len(R)} responses, not "
                f"arrays of the shapes {shapes}"
            )
        return scores

    def _correctness(self, judgement: Judgement) -> float:
        if self.abstention and judgement.abstained:
            return np.nan
        return judgement.R

    def token_weights(
        self, samples: Sequence[TrainingSample], blocks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return each token's share of the loss, float64 [T_i] per response.

        By ``loss_aggregation`` it is weight_b / (N_sequences |o_i|), weight_b / N_tokens, weight_b
        / N_b or weight_b / (N_sequences L), where N counts the trained part of all ``samples`` and
        L is ``max_response_length``. Responses that are not trained (``mask_truncated``) have 0.
        """
        trained = np.ones(len(samples), np.float64)
        if self.options.mask_truncated:
            for index, sample in enumerate(samples):
                if sample.judgement.status == "truncated":
                    trained[index] = 0.0
        lengths = np.array([len(block) for block in blocks], np.int64)
        sampled = np.array([np.count_nonzero(block) for block in blocks], np.int64)
        block = np.concatenate([np.empty(0, np.int8), *blocks])
        trained_tokens = np.repeat(trained, lengths)
        sequences = max(trained.sum(), 1.0)
        counts = []
        for each in (BLOCK_REASONING, BLOCK_CONFIDENCE):
            counts.append(float(np.count_nonzero((block == each) * trained_tokens)))
        how = self.options.loss_aggregation
        if how == "sequence_mean":
            denominator = np.repeat(sequences * np.maximum(sampled, 1), lengths)
        elif how == "constant":
            denominator = np.full(
                len(block), sequences * self.options.max_response_length
            )
        elif how == "token_mean":
            denominator = np.full(len(block), max(sum(counts), 1.0))
        else:
            of_block = np.array([1.0, max(counts[0], 1.0), max(counts[1], 1.0)])
            denominator = of_block[block]
        weight = np.array([0.0, *self.options.blocks("weight")])  # indexed by block id
        weights = weight[block] / denominator * trained_tokens
        return np.split(weights, np.cumsum(lengths)[:-1])[: len(lengths)]

    def trains(self, samples: Sequence[TrainingSample]) -> bool:
        """Return whether a group has a gradient in either block: an advantage other than 0 on a
        token with a weight. KL and entropy terms do not count, because every group would have them.
        Raises ValueError if the score needs old log-probs.
        """
        return any(
            _has_gradient(sample, sample.weights) for sample in self.score(samples)
        )

    def has_gradient(self, sample: TrainingSample, block: int | None = None) -> bool:
        """Return whether a scored sample can have a gradient, with KL and entropy terms; in
        ``block`` if one is named.
        """
        regularized = any(
            self.options.blocks("kl_coef") + self.options.blocks("entropy_coef")
        )
        if (
            self.token_loss is not clipped_policy_loss
            or regularized
            or self.options.entropy_target
        ):
            return True
        weights = sample.weights
        if weights is None:
            return False
        if block is not None:
            weights = np.where(sample.block_ids == block, weights, 0.0)
        return _has_gradient(sample, weights)

    def _mean_logprob(self, sample: TrainingSample) -> float:
        if not self.needs_old_logprobs:
            return np.nan
        if sample.mean_old_logprob is not None:
            return sample.mean_old_logprob
        old = sample.old_logprobs
        length = sample.judgement.length
        if old is None or len(old) != length:
            count = "none" if old is None else len(old)
            raise ValueError(
                f"objective {self.options.name} needs old_logprobs of all {length} tokens, got "
                f"{count}"
            )
        return mean_logprob(old)


def mean_logprob(logprobs: np.ndarray) -> float:
    """Return the mean log-prob of a response's tokens in float64; 0 without tokens."""
    return float(np.asarray(logprobs, np.float64).mean()) if len(logprobs) else 0.0


def _token_advantages(blocks: np.ndarray, A_r: float, A_c: float) -> np.ndarray:
    """Return A_r on reasoning tokens, A_c on confidence tokens, 0 on tokens of neither block."""
    advantages = np.zeros(len(blocks))
    advantages[blocks == BLOCK_REASONING] = A_r
    advantages[blocks == BLOCK_CONFIDENCE] = A_c
    return advantages


def blocks_of(sample: TrainingSample, options: ObjectiveConfig) -> np.ndarray:
    """Return the block of each response token, int8 [T]: none for a token that the policy did not
    sample.
    """
    blocks = block_ids(sample.judgement, options)
    if sample.response.loss_mask is not None:
        blocks[~sample.response.loss_mask] = BLOCK_NONE
    return blocks


def _has_gradient(sample: TrainingSample, weights: np.ndarray | None) -> bool:
    return bool(np.any(weights * sample.advantages))  # type: ignore[operator]


def _check_group(judgements: Sequence[Judgement]) -> None:
    if len(judgements) < 2:
        raise UserError(
            f"prompt {judgements[0].prompt_id!r} has one response; a group needs at least 2 "
            "(rollout.group_size)"
        )
    for judgement in judgements:
        c = judgement.confidence
        if (judgement.status == "ok") != (c is not None) or (
            c is not None and not 0 <= c <= 1
        ):
            raise UserError(
                f"prompt {judgement.prompt_id!r}: status {judgement.status!r} with confidence {c}; "
                "a number in [0, 1] goes with 'ok', and only with it"
            )
