"""Engine against trainer: how much the log-probs of the sampled tokens differ, in statistics that
add up over ranks; and which responses are computed for these statistics alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.policy_loss import old_logprobs
from megatron_dcpo.runtime.device import to_device
from megatron_dcpo.types import BLOCKS, MicroBatch, TokenOutputs, TrainingSample
from megatron_dcpo.weights.architecture import Architecture

MISMATCH_EDGES = (
    1e-6,
    1e-5,
    1e-4,
    1e-3,
    1e-2,
    0.03,
    0.1,
    0.3,
    1.0,
)  # of |engine - trainer| log-probs
# the edge that no token of a model without experts reaches
ROUTING_MISMATCH_THRESHOLD = {"fp32": 1e-3, "bf16": 0.1}
LARGEST = "engine/logprob_diff_max"
REDUCED_BY_MAX = frozenset(
    {LARGEST, *(f"{LARGEST}_{block}" for block in BLOCKS)}
)  # all others add up

SAMPLED = 16  # one in so many of the responses that move no weight is computed
# options of Megatron with which every token of a batch moves the routers
ROUTER_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias")


def computed(
    samples: Sequence[TrainingSample], method: Method, megatron: Mapping[str, Any]
) -> list[TrainingSample]:
    """Return the scored samples that take part in forward and backward, in their order: those that
    can have a gradient, and every sixteenth of the others, the first among them, whose mismatch
    stands for theirs.

    The denominators in the weights count all of them, so loss and gradient are those of all.
    ``megatron``: its options.
    """
    if any(megatron.get(option) for option in ROUTER_LOSSES):
        return list(samples)
    without = [i for i, sample in enumerate(samples) if not method.has_gradient(sample)]
    left_out = set(without) - set(without[::SAMPLED])
    return [sample for i, sample in enumerate(samples) if i not in left_out]


@torch.no_grad()
def mismatch_statistics(batch: MicroBatch, outputs: TokenOutputs) -> dict[str, Tensor]:
    """Return absolute differences of the log-probs, all and per block, their histogram, and the k3
    estimate of the divergence.
    """
    difference = old_logprobs(batch, outputs) - batch.columns["engine_logprobs"]
    magnitude = difference.abs()
    bins = torch.bucketize(magnitude, to_device(MISMATCH_EDGES, magnitude.dtype), right=True)
    statistics = {
        "engine/tokens": magnitude.new_full((), len(difference)),
        "engine/kl": (torch.expm1(difference) - difference).sum(),
        "engine/abs": magnitude.sum(),
        LARGEST: _largest(magnitude),
    }
    for block, rows in batch.block_rows.items():
        own = magnitude[rows]
        counts = rows.new_zeros(len(MISMATCH_EDGES) + 1).index_add_(
            0, bins[rows], torch.ones_like(rows)
        )
        statistics |= {
            f"engine/histogram/{block}/{number}": count for number, count in enumerate(counts)
        }
        statistics[f"engine/tokens/{block}"] = magnitude.new_full((), len(rows))
        statistics[f"engine/abs/{block}"] = own.sum()
        statistics[f"{LARGEST}_{block}"] = _largest(own)
    return statistics


def _largest(magnitude: Tensor) -> Tensor:
    return magnitude.max() if magnitude.numel() else magnitude.new_zeros(())


def mismatch_histogram(sums: dict[str, float]) -> dict[str, list[int]]:
    """Return the tokens of each block below the first edge, between two edges, above the last."""
    bins = range(len(MISMATCH_EDGES) + 1)
    return {
        block: [int(sums.get(f"engine/histogram/{block}/{n}", 0)) for n in bins] for block in BLOCKS
    }


def mismatch_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return ``engine/kl`` and ``engine/logprob_diff_mean`` of all sampled tokens, and the latter
    of each block.
    """

    def mean(name: str, block: str = "") -> float:
        return sums.get(f"engine/{name}{block}", 0.0) / max(
            sums.get(f"engine/tokens{block}", 0.0), 1.0
        )

    of_blocks = {f"engine/logprob_diff_mean_{block}": mean("abs", f"/{block}") for block in BLOCKS}
    return {"engine/kl": mean("kl"), "engine/logprob_diff_mean": mean("abs"), **of_blocks}


def routing_mismatch(
    arch: Architecture, params_dtype: str, sums: dict[str, float]
) -> dict[str, float]:
    """Return ``engine/routing_mismatch``, of a model with experts: the share of the sampled tokens
    whose log-probs in engine and trainer differ by more than rounding alone makes them
    (docs/rollout.md#engine-against-trainer).
    """
    if not arch.num_experts:
        return {}
    first = MISMATCH_EDGES.index(ROUTING_MISMATCH_THRESHOLD[params_dtype]) + 1
    counts = np.sum(list(mismatch_histogram(sums).values()), axis=0)
    return {"engine/routing_mismatch": float(counts[first:].sum() / max(counts.sum(), 1))}
