"""Engine against trainer: how much the log-probs of the sampled tokens differ, in statistics that
add up over ranks.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.objectives.policy_loss import masked, old_logprobs
from megatron_dcpo.runtime.device import to_device
from megatron_dcpo.types import BLOCKS, MicroBatch, ResponseKey, TokenOutputs

# the places of a response's tokens, and |engine - trainer| of the log-probs there
Apart = dict[int, float]

# of the histogram of |engine - trainer| log-probs
MISMATCH_EDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
# the edge that no token of a model without experts reaches
ROUTING_MISMATCH_THRESHOLD = {"fp32": 1e-3, "bf16": 0.1}
LARGEST = "engine/logprob_diff_max"
# all other statistics add up
REDUCED_BY_MAX = frozenset({LARGEST, *(f"{LARGEST}_{block}" for block in BLOCKS)})


@torch.no_grad()
def mismatch_statistics(batch: MicroBatch, outputs: TokenOutputs) -> dict[str, Tensor]:
    """Return absolute differences of the sampled tokens' log-probs, all and per block, their
    histogram, and the k3 estimate of the divergence.
    """
    difference = _differences(batch, outputs)
    sampled = sum(len(rows) for rows in batch.block_rows.values())
    magnitude = difference.abs()
    bins = torch.bucketize(magnitude, to_device(MISMATCH_EDGES, magnitude.dtype), right=True)
    statistics = {
        "engine/tokens": magnitude.new_full((), sampled),
        "engine/kl": (torch.expm1(difference) - difference).sum(),
        "engine/abs": magnitude.sum(),
        LARGEST: _largest(magnitude),
    }
    for block, rows in batch.block_rows.items():
        block_magnitude = magnitude[rows]
        counts = rows.new_zeros(len(MISMATCH_EDGES) + 1)
        counts = counts.index_add_(0, bins[rows], torch.ones_like(rows))
        for number, count in enumerate(counts):
            statistics[f"engine/histogram/{block}/{number}"] = count
        statistics[f"engine/tokens/{block}"] = magnitude.new_full((), len(rows))
        statistics[f"engine/abs/{block}"] = block_magnitude.sum()
        statistics[f"{LARGEST}_{block}"] = _largest(block_magnitude)
    return statistics


@torch.no_grad()
def tokens_apart(
    batch: MicroBatch, outputs: TokenOutputs, params_dtype: str, shown: Set[ResponseKey]
) -> dict[ResponseKey, Apart]:
    """Return the tokens of the ``shown`` responses of a micro-batch whose log-probs in engine and
    trainer differ by more than rounding makes them.
    """
    keys = [sample.response.key for sample in batch.samples]
    if shown.isdisjoint(keys):
        return {}
    magnitude = _differences(batch, outputs).abs()
    places = (magnitude > ROUTING_MISMATCH_THRESHOLD[params_dtype]).nonzero()[:, 0]
    lengths = [len(sample.response_ids) for sample in batch.samples]
    begins = np.cumsum([0, *lengths])
    numbers = batch.sequence_ids[places].tolist()
    values = magnitude[places].tolist()
    found: dict[ResponseKey, Apart] = {}
    for place, number, value in zip(places.tolist(), numbers, values, strict=True):
        if keys[number] in shown:
            found.setdefault(keys[number], {})[place - int(begins[number])] = value
    return found


def _differences(batch: MicroBatch, outputs: TokenOutputs) -> Tensor:
    """Return the trainer's log-probs minus the engine's. Tokens outside the blocks were not
    sampled, and differ by 0.
    """
    difference = old_logprobs(batch, outputs) - batch.columns["engine_logprobs"]
    return masked(difference, batch)


def _largest(magnitude: Tensor) -> Tensor:
    return magnitude.max() if magnitude.numel() else magnitude.new_zeros(())


def mismatch_histogram(sums: dict[str, float]) -> dict[str, list[int]]:
    """Return the tokens of each block below the first edge, between two edges, above the last."""
    bins = range(len(MISMATCH_EDGES) + 1)
    return {
        block: [int(sums.get(f"engine/histogram/{block}/{n}", 0)) for n in bins] for block in BLOCKS
    }


def mismatch_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Return ``engine/kl`` and ``engine/logprob_diff_mean`` of all sampled tokens, and the mean
    of each block.
    """

    def mean(name: str, block: str = "") -> float:
        tokens = sums.get(f"engine/tokens{block}", 0.0)
        return sums.get(f"engine/{name}{block}", 0.0) / max(tokens, 1.0)

    metrics = {"engine/kl": mean("kl"), "engine/logprob_diff_mean": mean("abs")}
    for block in BLOCKS:
        metrics[f"engine/logprob_diff_mean_{block}"] = mean("abs", f"/{block}")
    return metrics


def routing_mismatch(
    arch: Architecture, params_dtype: str, sums: dict[str, float]
) -> dict[str, float]:
    """Return ``engine/routing_mismatch``, of a model with experts: the share of the sampled tokens
    whose log-probs in engine and trainer differ by more than rounding alone makes them
    (docs/async.md#engine-against-trainer).
    """
    if not arch.num_experts:
        return {}
    first = MISMATCH_EDGES.index(ROUTING_MISMATCH_THRESHOLD[params_dtype]) + 1
    counts = np.sum(list(mismatch_histogram(sums).values()), axis=0)
    return {"engine/routing_mismatch": float(counts[first:].sum() / max(counts.sum(), 1))}
