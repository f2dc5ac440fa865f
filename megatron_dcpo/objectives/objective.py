"""An objective: a method with its options, in the four steps of the training loop.

scored = objective.score(judgements, old_logprobs)      # rewards and advantages, grouped by prompt id
counts = objective.counts(scored)                       # local denominators; summed over ranks by the trainer
weights = objective.token_weights(scored, counts)       # each token's share of the loss
losses, stats = objective.token_loss(batch)             # contributions whose plain sum is the loss
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.objectives.advantages import ScoreMiniBatch, make_group
from megatron_dcpo.objectives.options import CLIPPED_LOSS, COMMON, ObjectiveConfig
from megatron_dcpo.objectives.policy_loss import Stats, TokenBatch, clipped_policy_loss
from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING, Judgement, TokenAdvantages

if TYPE_CHECKING:
    from torch import Tensor

COUNT_NAMES = ("sequences", "reasoning_tokens", "confidence_tokens")


def no_defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """The method leaves every option to the preset."""
    return {}


@dataclass(frozen=True)
class Method:
    """What a file of this package declares: how a mini-batch is scored, and where the method differs from the rest.

    ``options``: the names that it reads; another one is refused when it is set. ``defaults``: its own values of options,
    which win over the preset's. ``needs_old_logprobs``: the score reads the log-probs of the policy that sampled.
    ``separable``: a token's loss depends on the policy's outputs at that token alone.
    """

    score: ScoreMiniBatch
    token_loss: Callable[[TokenBatch, ObjectiveConfig], tuple[Tensor, Stats]] = clipped_policy_loss
    defaults: Callable[[ObjectiveConfig], Mapping[str, Any]] = no_defaults
    options: frozenset[str] = COMMON | CLIPPED_LOSS
    needs_old_logprobs: bool = False
    separable: bool = True


@dataclass(frozen=True)
class Scored:
    """Judged responses with rewards and advantages, all in input order; float64 [N] arrays as in ``GroupScore``.

    ``trained`` bool [N] is False where a response takes no part in the loss (``mask_truncated``).
    """

    judgements: tuple[Judgement, ...]
    targets: np.ndarray
    R: np.ndarray
    R_c: np.ndarray
    A_r: np.ndarray
    A_c: np.ndarray
    trained: np.ndarray
    tokens: tuple[TokenAdvantages, ...]

    def __len__(self) -> int:
        return len(self.judgements)


@dataclass(frozen=True)
class Objective:
    """A method with its options; ``objectives.build_objective`` makes one. Holds no state."""

    options: ObjectiveConfig
    method: Method

    @property
    def separable(self) -> bool:
        """Whether :meth:`token_loss` may be called on some of a micro-batch's tokens: the loss is a plain sum over them."""
        return self.method.separable and self.options.tis_level != "sequence"

    def score(self, judgements: Sequence[Judgement], old_logprobs: Sequence[np.ndarray] | None = None) -> Scored:
        """Rewards and advantages of whole groups, collected by prompt id in any order.

        ``old_logprobs`` ([T_i] each) are read only by methods with ``needs_old_logprobs``. Raises UserError for a group of
        one, ValueError where the log-probs are missing or of another length than the response.
        """
        if self.method.needs_old_logprobs:
            _check_lengths(self.options.name, judgements, old_logprobs)
        groups: dict[str, list[int]] = {}
        for row, judgement in enumerate(judgements):
            groups.setdefault(judgement.prompt_id, []).append(row)
        old = [np.asarray(row, dtype=np.float64) for row in old_logprobs] if old_logprobs else None
        scores = self.method.score(
            [
                make_group([judgements[i] for i in rows], tuple(old[i] for i in rows) if old else None)
                for rows in groups.values()
            ],
            self.options,
        )
        columns = np.full((5, len(judgements)), np.nan)
        for rows, score in zip(groups.values(), scores, strict=True):
            columns[:, rows] = score.target, score.R, score.R_c, score.A_r, score.A_c
        targets, R, R_c, A_r, A_c = columns
        trained = np.array([not (self.options.mask_truncated and j.status == "truncated") for j in judgements], bool)
        tokens = spread_over_tokens(judgements, A_r, A_c, self.options)
        return Scored(tuple(judgements), targets, R, R_c, A_r, A_c, trained, tokens)

    def counts(self, scored: Scored) -> np.ndarray:
        """Local denominators, float64 [3], in the order of ``COUNT_NAMES``. Sum them over the data-parallel ranks."""
        blocks = [tokens.block_ids for tokens, trained in zip(scored.tokens, scored.trained, strict=True) if trained]
        flat = np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int8)
        block_counts = [np.count_nonzero(flat == block) for block in (BLOCK_REASONING, BLOCK_CONFIDENCE)]
        return np.array([len(blocks), *block_counts], dtype=np.float64)

    def token_weights(self, scored: Scored, counts: np.ndarray) -> list[np.ndarray]:
        """Each token's share of the loss, float64 [T_i] per response; ``counts`` are the global ones.

        weight_b / (N_sequences |o_i|), weight_b / N_tokens or weight_b / N_b by ``loss_aggregation``; block weight
        included; 0 on responses that are not trained.
        """
        sequences, *block_counts = np.maximum(counts, 1.0)
        weight = np.array([0.0, *self.options.blocks("weight")])  # indexed by block id
        per_block = np.array([1.0, *block_counts])
        lengths = np.array([len(tokens.block_ids) for tokens in scored.tokens], np.int64)
        blocks = np.concatenate([np.empty(0, np.int8), *(tokens.block_ids for tokens in scored.tokens)])
        denominators = {
            "sequence_mean": np.repeat(sequences * np.maximum(lengths, 1), lengths),
            "token_mean": np.full(len(blocks), max(float(counts[1] + counts[2]), 1.0)),
            "block_mean": per_block[blocks],
        }
        weights = weight[blocks] / denominators[self.options.loss_aggregation]
        return _by_response(weights * np.repeat(np.asarray(scored.trained, np.float64), lengths), lengths)

    def trains(self, judgements: Sequence[Judgement]) -> bool:
        """Whether a group has a gradient in either block: an advantage other than 0 on a token with a weight. KL and entropy
        terms do not count: they would be in every group.

        Raises ValueError for a method whose score needs the old log-probs.
        """
        scored = self.score(judgements)
        weights = self.token_weights(scored, self.counts(scored))
        return any(map(_bears_gradient, weights, scored.tokens))

    def bears_gradient(self, weights: np.ndarray, tokens: TokenAdvantages, block: int) -> bool:
        """Whether a response can have a gradient in ``block``, terms that have one in every response included."""
        options, inside = self.options, np.where(tokens.block_ids == block, weights, 0.0)
        if self.method.token_loss is not clipped_policy_loss or any(
            options.blocks("kl_coef") + options.blocks("entropy_coef")
        ):
            return True
        return _bears_gradient(inside, tokens)

    def token_loss(self, batch: TokenBatch) -> tuple[Tensor, Stats]:
        """Per-token contributions [n] and summable per-block statistics of one micro-batch of whole sequences."""
        return self.method.token_loss(batch, self.options)


def _bears_gradient(weights: np.ndarray, tokens: TokenAdvantages) -> bool:
    return bool(np.any(weights * tokens.advantages))


def spread_over_tokens(
    judgements: Sequence[Judgement], A_r: np.ndarray, A_c: np.ndarray, options: ObjectiveConfig
) -> tuple[TokenAdvantages, ...]:
    """A_r on the reasoning tokens, A_c on the confidence tokens, constant inside a block
    (docs/algorithms.md#4-advantages)."""
    lengths = np.array([j.length for j in judgements], np.int64)
    starts = np.minimum(np.array([confidence_start(j, options) for j in judgements], np.int64), lengths)
    counts = np.stack([starts, lengths - starts], axis=1).ravel()
    advantages = np.repeat(np.stack([A_r, A_c], axis=1).ravel(), counts)
    block_ids = np.repeat(np.array([BLOCK_REASONING, BLOCK_CONFIDENCE] * len(judgements), np.int8), counts)
    rows = zip(judgements, _by_response(advantages, lengths), _by_response(block_ids, lengths), strict=True)
    return tuple(TokenAdvantages(judgement.prompt_id, *row) for judgement, *row in rows)


def _by_response(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(lengths)[:-1])[: len(lengths)]


def confidence_start(judgement: Judgement, options: ObjectiveConfig) -> int:
    """First token of the confidence block. Only a response without a marker depends on ``fallback``.

    The splitter gives such a response its EOS as block (``eos``), and nothing when it was truncated. With
    ``marker_block: reasoning`` the block begins behind the marker: to write it is to stop reasoning.
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


def _check_lengths(name: str, judgements: Sequence[Judgement], old: Sequence[np.ndarray] | None) -> None:
    if old is None:
        raise ValueError(f"objective {name} needs old_logprobs to score a group")
    if [len(row) for row in old] != [j.length for j in judgements]:
        raise ValueError(f"objective {name}: old_logprobs must have one value per response token")
