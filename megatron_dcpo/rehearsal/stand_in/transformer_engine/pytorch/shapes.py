"""The layers on tensors that hold nothing: the shapes of what the kernels return, what the layers
keep for the backward pass, their collectives, and the products that they ask for.

As in the package's ``module/linear.py``, ``module/layernorm_linear.py`` and
``module/grouped_linear.py``: under sequence parallelism a layer keeps its rank's part of the input
and gathers it again; a weight's gradient is added to ``main_grad`` in the product itself. Of
attention this is a fused kernel's account; with context parallelism, keys and values go around the
ranks, or are gathered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_dcpo.runtime.rehearsed_values import read


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return _Norm.apply(x, weight)


def _gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


def _scattered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(part, x.contiguous(), group=group)
    return part


@functools.cache
def _dummy(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The package keeps one tensor of each shape for the hooks of overlapped gradients."""
    return torch.empty(shape, dtype=dtype, device=device)


def _weight_gradient(weight: Any, grad: Tensor, x: Tensor, fused: bool) -> Tensor | None:
    a, b = grad.flatten(0, -2).t(), x.flatten(0, -2)
    if not weight.requires_grad:
        return None
    if not fused:
        return a @ b
    sums = weight.main_grad
    torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return _dummy(tuple(weight.shape), weight.dtype, weight.device)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, norm_weight: Tensor | None, layer: Any
    ) -> Tensor:
        if weight.dtype != x.dtype:
            raise RuntimeError(f"a linear layer of {weight.dtype} was given {x.dtype}")
        kept = [x, weight]
        if norm_weight is not None:
            normed = torch.empty_like(x)
            kept += [norm_weight, normed, x.new_empty(x.shape[:-1], dtype=torch.float32)]
            x = normed
        ctx.layer = layer
        ctx.save_for_backward(*kept)
        split = layer.tp_size > 1
        if split and layer.parallel_mode == "column" and layer.sequence_parallel:
            x = _gathered(x, layer.tp_group)
        y = torch.nn.functional.linear(x, weight)
        if split and layer.parallel_mode == "row":
            if layer.sequence_parallel:
                return _scattered(y, layer.tp_group)
            dist.all_reduce(y, group=layer.tp_group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        x, weight, *of_norm = ctx.saved_tensors
        split = layer.tp_size > 1
        inputs = of_norm[1] if of_norm else x
        if split and layer.sequence_parallel:
            if layer.parallel_mode == "row":
                grad = _gathered(grad, layer.tp_group)
            elif weight.requires_grad:
                inputs = _gathered(inputs, layer.tp_group)
        of_inputs = grad @ weight
        of_weight = _weight_gradient(weight, grad, inputs, layer.fused)
        if split and layer.parallel_mode == "column":
            if layer.sequence_parallel:
                of_inputs = _scattered(of_inputs, layer.tp_group)
            else:
                dist.all_reduce(of_inputs, group=layer.tp_group)
        if not of_norm:
            return of_inputs, of_weight, None, None
        return torch.empty_like(x), of_weight, torch.empty_like(of_norm[0]), None


def linear(layer: Any, x: Tensor, norm_weight: Tensor | None = None) -> Any:
    y = _Linear.apply(x, layer.weight, norm_weight, layer)
    if layer.bias is None or layer.return_bias:
        return (y, layer.bias) if layer.return_bias else y
    return y + layer.bias


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: Sequence[int], *weights: Tensor) -> Tensor:
        if sum(splits) != len(x):
            raise RuntimeError(f"experts of {sum(splits)} tokens were given {len(x)}")
        ctx.splits = splits
        ctx.save_for_backward(x, *weights)
        return torch.nn.functional.linear(x, weights[0])  # all have this shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        stops = [0, *itertools.accumulate(ctx.splits)]
        of_weights = [
            _weight_gradient(weight, grad[start:stop], x[start:stop], hasattr(weight, "main_grad"))
            for weight, (start, stop) in zip(weights, itertools.pairwise(stops), strict=True)
        ]
        return grad @ weights[0], None, *of_weights


def grouped_linear(x: Tensor, splits: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
    return _GroupedLinear.apply(x, [int(split) for split in splits], *weights)


class _Attention(torch.autograd.Function):
    """Queries, keys and values are [s, b, heads, d] or [t, heads, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layer: Any, pairs: float) -> Tensor:
        ctx.layer, ctx.flops = layer, 2 * pairs * (q.shape[-1] + v.shape[-1])
        gathered = _around(layer, k, v, copies=1)
        out, logsumexp = torch.ops.rehearsed.attention(q, k, v, ctx.flops)
        del gathered
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out.flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        gathered = _around(ctx.layer, k, v, copies=2)
        gradients = torch.ops.rehearsed.attention_backward(q, k, v, ctx.flops)
        del gathered
        return (*gradients, None, None)


def _around(layer: Any, k: Tensor, v: Tensor, copies: int) -> list[Tensor]:
    """Return what a rank has of other ranks' keys and values, and of their gradients, at a time."""
    group = layer.cp_group
    if group is None or group.size() == 1:
        return []
    if layer.cp_comm_type == "all_gather":
        return [_gathered(x, group) for x in (k, v)]
    ranks = dist.get_process_group_ranks(group)
    here = ranks.index(dist.get_rank())
    after, before = ranks[(here + 1) % len(ranks)], ranks[here - 1]
    buffers = [k.new_empty(copies, 2, *k.shape) for _ in range(2)]
    for number in range(group.size() - 1):
        sent, received = buffers[number % 2], buffers[1 - number % 2]
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, after, group),
                dist.P2POp(dist.irecv, received, before, group),
            ]
        )
    return buffers


def attention(layer: Any, layers: Sequence[Tensor], bounds: Tensor | None) -> Tensor:
    """``bounds`` are the ``cu_seqlens`` of packed sequences, which the kernel reads."""
    q, k, v = layers
    size = 1 if layer.cp_group is None else layer.cp_group.size()
    if bounds is None:
        lengths = [len(q) * size] * q.shape[1]
    else:
        lengths = read(bounds).diff().tolist()
    before = layer.window[0]
    pairs = 0.0
    for length in lengths:
        pairs += length * length / 2
        if 0 <= before < length:
            pairs -= (length - before) ** 2 / 2
    return _Attention.apply(q, k, v, layer, pairs * q.shape[-2] / size)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(grad), None


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    return _Rotated.apply(x, freqs)
