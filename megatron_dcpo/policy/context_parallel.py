"""Context parallelism: every sequence is cut into 2 x CP chunks, and rank r has the chunks r and 2
CP - 1 - r, so that all ranks attend to equally many keys. Megatron's rotary embeddings and
Transformer Engine's attention number the chunks in this way.

A rank scores the response tokens whose logits it has. The log-probs and entropies of all ranks are
put together before the loss, which sees whole responses. The gradient of the loss goes back to the
ranks that have the tokens, and DDP sums the parameters' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import FunctionCtx, NestedIOFunction

from megatron_dcpo.runtime.device import to_device
from megatron_dcpo.types import TokenOutputs


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
    by_position = to_device(np.argsort(order))
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


def tokens_of_rank(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return the tokens at the positions ``order`` of the flattened batch, [b, s / CP, ...] of
    ``values`` [b, s, ...].
    """
    per_token = values.shape[2:]
    return values.reshape(-1, *per_token)[order].reshape(len(values), -1, *per_token)


def places_of_rank(rows: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Return where the tokens ``rows`` of a flattened batch of ``count`` tokens are among those at
    ``order``, -1 for a token that another rank has.
    """
    places = np.full(count, -1)
    places[order] = np.arange(len(order))
    return places[rows]
