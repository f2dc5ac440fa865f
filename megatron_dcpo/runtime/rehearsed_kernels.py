"""Kernels of a rehearsal: the shapes of what they return, what they keep for the backward pass, and
how many operations they take.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed._tools import fake_collectives  # noqa: F401 - has most of them
from torch.optim import Optimizer
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
def _attention(q: Tensor, k: Tensor, v: Tensor, flops: float) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("there are only shapes")


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, flops: float) -> tuple[Tensor, Tensor]:
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("rehearsed::attention_backward", mutates_args=())
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, flops: float
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("there are only shapes")


@_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, flops: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@register_flop_formula(torch.ops.rehearsed.attention)
def _forward_flops(q: torch.Size, k: torch.Size, v: torch.Size, flops: float, **_: object) -> int:
    """Two products, of queries with keys and of their scores with values."""
    return int(flops)


@register_flop_formula(torch.ops.rehearsed.attention_backward)
def _backward_flops(q: torch.Size, k: torch.Size, v: torch.Size, flops: float, **_: object) -> int:
    """Five products, as the scores are computed again."""
    return int(2.5 * flops)


class _Attention(torch.autograd.Function):
    """The shapes of a fused attention: it keeps queries, keys, values, its output and the
    log-sum-exp of the scores, and never the scores.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, flops: float) -> Tensor:  # noqa: ANN401
        out: Tensor
        out, logsumexp = torch.ops.rehearsed.attention(q, k, v, flops)
        ctx.flops = flops
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        q, k, v, _, _ = ctx.saved_tensors
        return (*torch.ops.rehearsed.attention_backward(q, k, v, ctx.flops), None)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: object
) -> Tensor:
    """Stand in for ``F.scaled_dot_product_attention``, [b, heads, s, d]. A causal one looks at half
    of all pairs of queries and keys.
    """
    for other in (key, value, attn_mask):
        if other is not None and other.device != query.device:
            raise RuntimeError(f"attention of queries on {query.device} to {other.device}")
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise RuntimeError(f"attention of {query.dtype} to {key.dtype} and {value.dtype}")
    if not options.get("enable_gqa") and key.shape[1] != query.shape[1]:
        raise RuntimeError(f"attention of {query.shape[1]} heads to {key.shape[1]}")
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    if options.get("is_causal"):
        pairs //= 2
    flops = 2.0 * pairs * (query.shape[-1] + value.shape[-1])
    out: Tensor = _Attention.apply(query, key, value, flops)
    return out


def norm_of_all(
    _: int, __: Tensor, tensor_lists: list[list[Tensor]], per_parameter: bool, *___: object
) -> tuple[Tensor, None]:
    """Stand in for the fused kernel of the norm of all gradients, which stays on the device."""
    norms = [tensor.norm(dtype=torch.float32) for tensors in tensor_lists for tensor in tensors]
    return torch.stack(norms).norm().view(1), None


def adam_in_place(optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> None:
    """Stand in for the fused kernel of Adam, which writes over parameters and moments and makes
    nothing.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        state["exp_avg"].lerp_(parameter.grad, 1 - group["betas"][0])
        state["exp_avg_sq"].addcmul_(parameter.grad, parameter.grad)
        parameter.add_(state["exp_avg"])
