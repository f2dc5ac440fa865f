"""CCGSPG: sequence-level policy gradient with the sequence's own probability as confidence
(docs/algorithms.md#2-methods).

No importance ratio and no clipping. The stated confidence is not used; the blocks share one
advantage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_dcpo.objectives.advantages import REWARD_TOLERANCE, Scores
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import COMMON, ObjectiveConfig
from megatron_dcpo.objectives.policy_loss import (
    Stats,
    by_block,
    masked,
    regularizers,
    sequence_sums,
)
from megatron_dcpo.types import BLOCK_NONE, MicroBatch, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor

ONE_MINUS_C_CLAMP = 1e-4


def score_group(
    R: np.ndarray, c: np.ndarray, logprob: np.ndarray, options: ObjectiveConfig
) -> Scores:
    """Return A_i = (R_i - mean R) / (1 - c_i + eps) with c_i = exp(mean_t logp_old), in float64 and
    not divided by a std.

    1 - c_i is kept above ``ONE_MINUS_C_CLAMP``, because the quotient would grow without bound as
    the model becomes certain.
    """
    one_minus_c = np.maximum(-np.expm1(logprob), ONE_MINUS_C_CLAMP)
    if np.ptp(R) >= REWARD_TOLERANCE:
        centered = R - R.mean()
    else:
        centered = 0 * R
    A = centered / (one_minus_c + options.eps)
    return R.copy(), R.copy(), np.full_like(A, np.nan), A, A


def token_loss(
    batch: MicroBatch, outputs: TokenOutputs, options: ObjectiveConfig
) -> tuple[Tensor, Stats]:
    """Return -w_t (A_i log c_i + beta (R_i log c_i + (1 - R_i) log(1 - c_i))) on each token of
    sequence i, [n].

    With sequence-mean weights 1 / (N |o_i|) the tokens of a sequence sum to 1/N of its loss.
    """
    valid = batch.columns["block_ids"] != BLOCK_NONE
    logprobs = masked(outputs.logprobs, batch)
    lengths = sequence_sums(valid.to(logprobs), batch).clamp(min=1)
    log_c = sequence_sums(logprobs, batch) / lengths
    log_one_minus_c = (-log_c.expm1()).clamp(min=ONE_MINUS_C_CLAMP).log()
    R = batch.R.to(logprobs)
    regularizer = options.options["beta"] * (R * log_c + (1 - R) * log_one_minus_c)
    extra, stats = regularizers(batch, outputs, options)
    A = masked(batch.columns["advantages"].to(logprobs), batch)
    weights = masked(batch.columns["weights"].to(logprobs), batch)
    losses = weights * (extra - A * log_c[batch.sequence_ids] - regularizer[batch.sequence_ids])
    stats |= by_block("loss", losses, batch)
    stats |= by_block("tokens", losses.new_ones(losses.shape), batch)
    return losses, stats


def defaults(config: ObjectiveConfig) -> Mapping[str, Any]:
    """Return a mean over sequences, whatever the preset does for token losses."""
    return {"loss_aggregation": "sequence_mean", "weight": 1.0}


METHOD = Method(
    score_group=score_group,
    token_loss=token_loss,
    reads=COMMON | {"eps"},
    own_options={"beta": 0.01},
    meanings={"beta": "Factor of the cross-entropy of the sequence's own probability against R."},
    defaults=defaults,
    needs_old_logprobs=True,
    separable=False,
)
