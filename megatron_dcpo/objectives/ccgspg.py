"""CCGSPG: sequence-level policy gradient with the sequence's own probability as confidence (docs/algorithms.md#2-methods).

No importance ratio and no clipping. The stated confidence is not used; the blocks share one advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.objectives.advantages import REWARD_TOLERANCE, Group, GroupScore, by_group
from megatron_dcpo.objectives.objective import Method
from megatron_dcpo.objectives.options import COMMON, ObjectiveConfig
from megatron_dcpo.objectives.policy_loss import (
    Stats,
    TokenBatch,
    by_block,
    masked_logprobs,
    regularizers,
    sequence_sums,
)
from megatron_dcpo.types import BLOCK_NONE

if TYPE_CHECKING:
    from torch import Tensor


def score_group(group: Group, options: ObjectiveConfig) -> GroupScore:
    """A_i = (R_i - mean R) / (1 - c_i + eps), c_i = exp(mean_t logp_old) in float64, not divided by a std.

    1 - c_i is held above ``one_minus_c_clamp``: the division would grow without bound as the model grows sure.
    """
    assert group.old_logprobs is not None  # Method.needs_old_logprobs
    mean_logprob = np.array([row.mean() if len(row) else 0.0 for row in group.old_logprobs])
    one_minus_c = np.maximum(-np.expm1(mean_logprob), options.one_minus_c_clamp)
    centred = group.correct - group.correct.mean() if np.ptp(group.correct) >= REWARD_TOLERANCE else 0 * group.correct
    A = centred / (one_minus_c + options.eps)
    return GroupScore(group.correct.copy(), group.correct.copy(), np.full_like(A, np.nan), A, A)


def token_loss(batch: TokenBatch, options: ObjectiveConfig) -> tuple[Tensor, Stats]:
    """-w_t (A_i log c_i + beta (R_i log c_i + (1 - R_i) log(1 - c_i))) on each token of sequence i, [n].

    With sequence-mean weights 1 / (N |o_i|) the tokens of a sequence sum to 1/N of its loss.
    """
    if batch.correct is None:
        raise ValueError("objective ccgspg needs TokenBatch.correct, and the batch has none")
    valid = batch.block_ids != BLOCK_NONE
    logprobs = masked_logprobs(batch)
    lengths = sequence_sums(valid.to(logprobs), batch).clamp(min=1)
    log_c = sequence_sums(logprobs, batch) / lengths
    log_one_minus_c = (-log_c.expm1()).clamp(min=options.one_minus_c_clamp).log()
    R = batch.correct.to(logprobs)
    regularizer = options.beta * (R * log_c + (1 - R) * log_one_minus_c)
    extra, stats = regularizers(batch, options)
    nothing = logprobs.new_zeros(())
    A = batch.advantages.to(logprobs).where(valid, nothing)
    weights = batch.weights.to(logprobs).where(valid, nothing)
    losses = weights * (extra - A * log_c[batch.sequence_ids] - regularizer[batch.sequence_ids])
    return losses, stats | by_block("loss", losses, batch) | by_block("tokens", losses.new_ones(losses.shape), batch)


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """The objective is a mean over sequences, whatever the preset does for token losses."""
    return {"loss_aggregation": "sequence_mean", "weight": 1.0}


METHOD = Method(
    by_group(score_group),
    token_loss,
    defaults,
    options=COMMON | {"beta", "one_minus_c_clamp", "eps"},
    needs_old_logprobs=True,
    separable=False,
)
