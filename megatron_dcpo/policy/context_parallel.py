"""Context parallelism: every sequence is cut into 2 x CP chunks, of which rank r has r and 2 CP - 1
- r, first and last together, so that all ranks attend to as many keys. Megatron's rotary embeddings
and Transformer Engine's attention count so.

A rank scores the response tokens whose logits it has; log-probs and entropies of all are put
together before the loss, which sees whole responses. Its gradient goes back to the ranks that have
the tokens, and DDP sums theirs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# isort: skip
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_dcpo.types import MicroBatch, TokenOutputs


def positions_of(bounds: Sequence[tuple[int, int]], rank: int, size: int) -> np.ndarray:
    """Return, int64, where the tokens of context-parallel ``rank`` stand, in its order. ``bounds``:
    start and stop of the sequences, each a multiple of 2 x ``size`` long.
    """
    pieces = []
    for start, stop in bounds:
        width = (stop - start) // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            pieces.append(np.arange(start + chunk * width, start + (chunk + 1) * width))
    return np.concatenate(pieces)


def gather_keys_and_values(
    key: Tensor, value: Tensor, bounds: Sequence[tuple[int, int]], group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the keys and values [s / CP, ...] of all ranks, [s, ...] in the order of the tokens.
    Its backward pass sums over ranks.
    """
    size = group.size()
    both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=group)
    order = np.concatenate([positions_of(bounds, rank, size) for rank in range(size)])
    both = both.index_select(0, torch.from_numpy(np.argsort(order)).to(both.device))
    return both.split([key.shape[-1], value.shape[-1]], dim=-1)  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    """From the values [n, ...] that this rank has at ``here`` those of all, [count, ...]. Every
    rank computes the whole loss; its gradient is its own tokens' part.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, here: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(here)
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, here, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None, None


def gather_over_context_parallel(
    outputs: TokenOutputs, here: Tensor, count: int, group: dist.ProcessGroup
) -> TokenOutputs:
    """Return the outputs of all ``count`` response tokens, of which this rank has those at
    ``here``. Differentiable, collective.
    """
    return TokenOutputs(
        *(
            _Gather.apply(values, here, count, group)
            for values in (outputs.logprobs, outputs.entropy)
        )
    )


def slice_for_rank(batch: MicroBatch, context_parallel: tuple[int, int]) -> MicroBatch:
    """Return a micro-batch with the tokens of this context-parallel rank alone."""
    count, width = batch.tokens.shape
    ends = [row * width for row in range(count + 1)]
    if batch.packed_seq_params is not None:
        ends = batch.packed_seq_params.cu_seqlens_q.tolist()
    order = torch.from_numpy(positions_of(list(itertools.pairwise(ends)), *context_parallel)).to(
        batch.tokens.device
    )
    place = torch.full((count * width,), -1, device=order.device).index_copy_(
        0, order, torch.arange(len(order), device=order.device)
    )
    rows = place[batch.rows]
    return dataclasses.replace(
        batch,
        tokens=batch.tokens.reshape(-1)[order].view(count, -1),
        position_ids=batch.position_ids.reshape(-1)[order].view(count, -1),
        rows=rows,
        here=(rows >= 0).nonzero()[:, 0],
        experts=None
        if batch.experts is None
        else batch.experts.flatten(0, 1)[order].unflatten(0, (count, -1)),
    )
