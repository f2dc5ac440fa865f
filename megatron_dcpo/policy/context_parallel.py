"""Context parallelism: every sequence is cut into 2 x CP chunks, and rank r has the chunks r and 2
CP - 1 - r, so that all ranks attend to equally many keys. Megatron's rotary embeddings and
Transformer Engine's attention number the chunks in this way.

A rank scores the response tokens whose logits it has. The log-probs and entropies of all ranks are
put together before the loss, which sees whole responses. The gradient of the loss goes back to the
ranks that have the tokens, and DDP sums the parameters' gradients.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import FunctionCtx, NestedIOFunction

from megatron_dcpo.types import MicroBatch, TokenOutputs


def positions_of(bounds: Sequence[tuple[int, int]], rank: int, size: int) -> np.ndarray:
    """Return the positions, int64, of the tokens that context-parallel ``rank`` has, in its order.
    ``bounds`` are start and stop of the sequences, each of which is a multiple of 2 x ``size``
    long.
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
    """Gather this rank's keys and values [s / CP, ...] from all ranks; return them as [s, ...] in
    the order of the tokens. The backward pass sums over ranks.
    """
    size = group.size()
    both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=group)
    order = np.concatenate([positions_of(bounds, rank, size) for rank in range(size)])
    by_position = torch.from_numpy(np.argsort(order)).to(both.device)
    both = both.index_select(0, by_position)
    keys, values = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    return keys, values


class _Gather(torch.autograd.Function):
    """Put together the values [count, ...] of all ranks; this rank has the values [n, ...] at the
    indices ``here``. Every rank computes the whole loss, and its gradient is that of its tokens.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, values: Tensor, here: Tensor, count: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(here)
        whole = values.new_zeros(count, *values.shape[1:]).index_copy_(0, here, values)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: NestedIOFunction, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (here,) = ctx.saved_tensors
        return grads[0].index_select(0, here), None, None, None


def gather_over_context_parallel(
    outputs: TokenOutputs, here: Tensor, count: int, group: dist.ProcessGroup
) -> TokenOutputs:
    """Return the outputs of all ``count`` response tokens, given the ``outputs`` that this rank has
    at the indices ``here``. Differentiable. Collective.
    """
    return TokenOutputs(
        logprobs=_Gather.apply(outputs.logprobs, here, count, group),
        entropy=_Gather.apply(outputs.entropy, here, count, group),
    )


def slice_for_rank(batch: MicroBatch, context_parallel: tuple[int, int]) -> MicroBatch:
    """Return a micro-batch with the tokens of one context-parallel rank. ``context_parallel`` is
    its rank and the size of the group.
    """
    rank, size = context_parallel
    count, width = batch.tokens.shape
    if batch.packed_seq_params is None:
        ends = [row * width for row in range(count + 1)]
    else:
        ends = batch.packed_seq_params.cu_seqlens_q.tolist()
    positions = positions_of(list(itertools.pairwise(ends)), rank, size)
    order = torch.from_numpy(positions).to(batch.tokens.device)
    # where each token of the whole batch is among this rank's; -1 if another rank has it
    index = torch.full((count * width,), -1, device=order.device)
    index.index_copy_(0, order, torch.arange(len(order), device=order.device))
    rows = index[batch.rows]
    experts = None
    if batch.experts is not None:
        experts = batch.experts.flatten(0, 1)[order].unflatten(0, (count, -1))
    return dataclasses.replace(
        batch,
        tokens=batch.tokens.reshape(-1)[order].view(count, -1),
        position_ids=batch.position_ids.reshape(-1)[order].view(count, -1),
        rows=rows,
        here=(rows >= 0).nonzero()[:, 0],
        experts=experts,
    )
