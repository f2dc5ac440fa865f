"""A method: how a group of responses is scored, and the loss of a token.

samples = method.score(samples)                         # rewards, advantages, blocks and weights of
every sample contributions, statistics = method.loss(batch, outputs) # per token of a micro-batch;
their plain sum is the loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives.advantages import batch_scale, block_ids, scored_confidence
from megatron_dcpo.objectives.options import CLIPPED_LOSS, COMMON, ObjectiveConfig
from megatron_dcpo.objectives.policy_loss import Stats, clipped_policy_loss
from megatron_dcpo.objectives.shaping import with_length_penalty
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

# A group's correctness R, confidence c (NaN where it is malformed) and mean log-prob, float64 [G]
# each, and the options -> ``SCORES``, float64 [G] each: what the confidence is compared with, the
# reward behind A_r, the calibration reward (NaN where the method has none), the advantages of the
# reasoning and of the confidence tokens.
ScoreGroup = Callable[[np.ndarray, np.ndarray, np.ndarray, ObjectiveConfig], Sequence[np.ndarray]]
TokenLoss = Callable[[MicroBatch, TokenOutputs, ObjectiveConfig], "tuple[Tensor, Stats]"]


def no_defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Leave every option to the preset."""
    return {}


@dataclass(frozen=True)
class Method:
    """What a file of this package (or a user's) declares; ``objectives.build_method`` adds the
    ``options``. Holds no state.

    ``score_group``: see :data:`ScoreGroup`. ``token_loss``: contributions [n] of a micro-batch's
    tokens, and sums over them. ``reads``: names of the options that it reads; another one is
    refused when it is set. ``own_options``: options of its own with their defaults (of a tuple of
    choices the first), set under ``objective.options``; ``meanings``: a sentence on each.
    ``defaults``: its own values of options, which win over the preset's. ``needs_old_logprobs``:
    the score reads the mean log-prob of each response under the policy that sampled. ``separable``:
    a token's loss depends on the policy's outputs at that token alone. ``batch_scaled``: the
    advantages that ``batch_std`` brings to one scale.
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
    abstention: bool = False  # R is NaN for a response that says it does not know
    options: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    @property
    def loss_is_separable(self) -> bool:
        """Return whether :meth:`loss` may be called on some of a micro-batch's tokens: the loss is
        a plain sum over them.
        """
        return (
            self.separable
            and self.options.ratio == "token"
            and self.options.tis_level in ("none", "token")
        )

    def loss(self, batch: MicroBatch, outputs: TokenOutputs) -> tuple[Tensor, Stats]:
        """Return per-token contributions [n] of a micro-batch, and statistics that add up over
        micro-batches and ranks.
        """
        return self.token_loss(batch, outputs, self.options)

    def with_entropy_coef(self, coef: float) -> Method:
        """Return the method with another coefficient of the reasoning's entropy
        (``entropy_target``).
        """
        return replace(
            self, options=self.options.model_copy(update={"entropy_coef_reasoning": coef})
        )

    def score(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples of a mini-batch with rewards, advantages, blocks and token weights.

        Groups are collected by prompt id, in any order; the denominators of the weights are those
        of all ``samples``. Raises :class:`UserError` for a group of one, ValueError where log-probs
        are missing.
        """
        scores = self.group_scores(samples)
        blocks = [blocks_of(sample, self.options) for sample in samples]
        weights = self.token_weights(samples, blocks)
        return [
            replaced(
                value=sample,
                R=float(R),
                R_c=float(R_c),
                advantages=np.select(
                    [block == BLOCK_REASONING, block == BLOCK_CONFIDENCE], [A_r, A_c], default=0.0
                ),
                block_ids=block,
                weights=weight,
            )
            for sample, block, weight, (_, R, R_c, A_r, A_c) in zip(
                samples, blocks, weights, scores.T, strict=True
            )
        ]

    def group_scores(self, samples: Sequence[TrainingSample]) -> np.ndarray:
        """Return :data:`SCORES` of every sample, float64 [5, N]. Raises as :meth:`score`."""
        groups: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.judgement.prompt_id, []).append(row)
        judgements = [sample.judgement for sample in samples]
        for rows in groups.values():
            _check_group([judgements[row] for row in rows])
        R = np.array(
            [np.nan if self.abstention and j.abstained else j.R for j in judgements], np.float64
        )
        c = np.array([scored_confidence(j, self.options) for j in judgements], np.float64)
        logprob = np.array([self._mean_logprob(sample) for sample in samples], np.float64)
        scores = np.full((len(SCORES), len(samples)), np.nan)
        for rows in groups.values():
            scored = self.score_group(R[rows], c[rows], logprob[rows], self.options)
            if self.options.overlong_buffer:
                scored = with_length_penalty(
                    scored, np.array([judgements[row].length for row in rows]), self.options
                )
            scores[:, rows] = scored
        if self.options.advantage_normalization_confidence == "batch_std" and not np.isnan(R).all():
            order = np.concatenate(list(groups.values()))
            scale = batch_scale(scores[SCORES.index("A_c"), order[~np.isnan(R[order])]])
            for name in self.batch_scaled:
                scores[SCORES.index(name)] /= scale
        return scores

    def token_weights(
        self, samples: Sequence[TrainingSample], blocks: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return each token's share of the loss, float64 [T_i] per response.

        weight_b / (N_sequences |o_i|), weight_b / N_tokens, weight_b / N_b or weight_b /
        (N_sequences L) by ``loss_aggregation``, where N counts what is trained of all ``samples``
        and L is ``max_response_length``; 0 on responses that are not trained (``mask_truncated``).
        """
        masked = self.options.mask_truncated
        trained = np.array(
            [not (masked and sample.judgement.status == "truncated") for sample in samples],
            np.float64,
        )
        lengths = np.array([len(block) for block in blocks], np.int64)
        sampled = np.array([np.count_nonzero(block) for block in blocks], np.int64)
        block = np.concatenate([np.empty(0, np.int8), *blocks])
        trained_tokens = np.repeat(trained, lengths)
        counts = [
            float(np.count_nonzero((block == b) * trained_tokens))
            for b in (BLOCK_REASONING, BLOCK_CONFIDENCE)
        ]
        denominators = {
            "sequence_mean": np.repeat(max(trained.sum(), 1.0) * np.maximum(sampled, 1), lengths),
            "constant": np.full(
                len(block), max(trained.sum(), 1.0) * self.options.max_response_length
            ),
            "token_mean": np.full(len(block), max(sum(counts), 1.0)),
            "block_mean": np.array([1.0, *(max(count, 1.0) for count in counts)])[block],
        }
        weight = np.array([0.0, *self.options.blocks("weight")])  # indexed by block id
        weights = weight[block] / denominators[self.options.loss_aggregation] * trained_tokens
        return np.split(weights, np.cumsum(lengths)[:-1])[: len(lengths)]

    def trains(self, samples: Sequence[TrainingSample]) -> bool:
        """Return whether a group has a gradient in either block: an advantage other than 0 on a
        token with a weight. KL and entropy terms do not count: they would be in every group. Raises
        ValueError where the score needs old log-probs.
        """
        return any(_has_gradient(sample, sample.weights) for sample in self.score(samples))

    def has_gradient(self, sample: TrainingSample, block: int | None = None) -> bool:
        """Return whether a scored sample can have a gradient, in ``block`` where one is named, KL
        and entropy terms included.
        """
        regularized = any(self.options.blocks("kl_coef") + self.options.blocks("entropy_coef"))
        if self.token_loss is not clipped_policy_loss or regularized or self.options.entropy_target:
            return True
        if (weights := sample.weights) is not None and block is not None:
            weights = np.where(sample.block_ids == block, weights, 0.0)
        return weights is not None and _has_gradient(sample, weights)

    def _mean_logprob(self, sample: TrainingSample) -> float:
        if not self.needs_old_logprobs:
            return np.nan
        if sample.mean_old_logprob is not None:
            return sample.mean_old_logprob
        old = sample.old_logprobs
        length = sample.judgement.length
        if old is None or len(old) != length:
            found = "none" if old is None else len(old)
            raise ValueError(
                f"objective {self.options.name} needs old_logprobs of all {length} tokens, got "
                f"{found}"
            )
        return mean_logprob(old)


def mean_logprob(logprobs: np.ndarray) -> float:
    """Return the mean log-prob of a response's tokens in float64; 0 without tokens."""
    return float(np.asarray(logprobs, np.float64).mean()) if len(logprobs) else 0.0


def blocks_of(sample: TrainingSample, options: ObjectiveConfig) -> np.ndarray:
    """Return the block of each response token, int8 [T]: none for a token that the policy did not
    sample.
    """
    blocks = block_ids(sample.judgement, options)
    if sample.response.loss_mask is not None:
        blocks[~sample.response.loss_mask] = BLOCK_NONE
    return blocks


def _has_gradient(sample: TrainingSample, weights: Any) -> bool:
    return bool(np.any(weights * sample.advantages))


def _check_group(judgements: Sequence[Judgement]) -> None:
    if len(judgements) < 2:
        raise UserError(
            f"prompt {judgements[0].prompt_id!r} has one response; a group needs at least 2 "
            "(rollout.group_size)"
        )
    for judgement in judgements:
        c = judgement.confidence
        if (judgement.status == "ok") != (c is not None) or (c is not None and not 0 <= c <= 1):
            raise UserError(
                f"prompt {judgement.prompt_id!r}: status {judgement.status!r} with confidence {c}; "
                "a number in [0, 1] goes with 'ok', and only with it"
            )
