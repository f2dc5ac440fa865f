"""Kernels of a rehearsal: the shapes of what they return, what they keep for the backward pass, and
how many operations they take.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed  # declares the operations of ``c10d``
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed._tools import fake_collectives  # noqa: F401 - has most of them
from torch.utils.flop_counter import register_flop_formula


_COLLECTIVES = torch.library.Library("c10d", "IMPL", "Meta")


def _finished(*_: object) -> object:
    return FakeWork().boxed()


for _name in (
    "allgather_into_tensor_coalesced_",
    "allreduce_coalesced_",
    "reduce_scatter_tensor_coalesced_",
):
    _COLLECTIVES.impl(_name, _finished)


@torch.library.custom_op("rehearsed::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, pairs: float) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("there are only shapes")


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, pairs: float) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("rehearsed::attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, pairs: float
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("there are only shapes")


@_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, pairs: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@register_flop_formula(torch.ops.rehearsed.attention)
def _forward_flops(
    q: torch.Size, k: torch.Size, v: torch.Size, pairs: float, **_: object
) -> int:
    """Two products, of queries with keys and of their scores with values."""
    heads = math.prod(q[:-2])
    return int(2 * heads * q[-2] * k[-2] * pairs * (q[-1] + v[-1]))


@register_flop_formula(torch.ops.rehearsed.attention_backward)
def _backward_flops(
    q: torch.Size, k: torch.Size, v: torch.Size, pairs: float, **_: object
) -> int:
    """Five products, as the scores are computed again."""
    heads = math.prod(q[:-2])
    return int(2 * heads * q[-2] * k[-2] * pairs * (3 * q[-1] + 2 * v[-1]))


class _Attention(torch.autograd.Function):
    """The shapes of a fused attention: it keeps queries, keys, values, its output and the
    log-sum-exp of the scores, and never the scores.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pairs: float) -> Tensor:  # noqa: ANN401
        out: Tensor
        out, logsumexp = torch.ops.rehearsed.attention(q, k, v, pairs)
        ctx.pairs = pairs
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, k, v, _, _ = ctx.saved_tensors
        return (*torch.ops.rehearsed.attention_backward(q, k, v, ctx.pairs), None)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stand in for ``F.scaled_dot_product_attention``, [b, heads, s, d]. A causal one looks at half
    of all pairs of queries and keys.
    """
    for other in (key, value, attn_mask):
        if other is not None and other.device != query.device:
            raise RuntimeError(f"attention of queries on {query.device} to {other.device}")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise RuntimeError(f"attention of {query.dtype} to {key.dtype} and {value.dtype}")
    if not enable_gqa and key.shape[1] != query.shape[1]:
        raise RuntimeError(f"attention of {query.shape[1]} heads to {key.shape[1]}")
    out: Tensor = _Attention.apply(query, key, value, 0.5 if is_causal else 1.0)
    return out


def norm_of_all(
    _: int, __: Tensor, tensor_lists: list[list[Tensor]], per_parameter: bool, *___: object
) -> tuple[Tensor, None]:
    """Stand in for the fused kernel of the norm of all gradients, which stays on the device."""
    norms = [tensor.norm(dtype=torch.float32) for tensors in tensor_lists for tensor in tensors]
    return torch.stack(norms).norm().view(1), None
