"""The output layer: from hidden states to log-probs, entropies and the loss's gradient, without
ever holding all logits [tokens, vocabulary].

With z the temperature-scaled logits, split over tensor-parallel ranks along the vocabulary:

    logsumexp(z) = m + log sum_ranks sum_local exp(z - m),  m = max over ranks
    log p(y)     = z_y - logsumexp(z)
    H            = logsumexp(z) - sum_v p_v z_v

The rows come in chunks, whose logits share one fp32 buffer, with two all-reduces of a few numbers
per row. A loss that is a sum over tokens gets its gradient while the chunk's exp(z - m) is in the
buffer (:func:`fused_loss`: three products with the weight). Any other loss needs all log-probs
first, and its backward pass computes the logits again (:func:`token_outputs`: four products). The
weight's gradient is added to Megatron's fp32 buffer if there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megatron_dcpo.runtime.device import add_fp32_product, capabilities, fp32_product
from megatron_dcpo.types import TokenOutputs

# The logits of a chunk on a GPU. With fewer, the weight's gradient is read and written too often.
LOGITS_AT_ONCE = 1 << 26
# The rows of a chunk on a CPU, at least, for the same reason; more if the vocabulary is small.
CHUNK_ROWS = 112
# The elements of a chunk on which a CPU works at a time, so that they stay in its cache. A GPU
# works on an eighth of the chunk.
BLOCK_ELEMENTS = 1 << 19
# The elements of the weight's gradient in one product, if that is rounded before it is added.
PRODUCT_ELEMENTS = 1 << 23

PartLoss = Callable[[slice, "TokenOutputs"], Tensor]


@dataclass(frozen=True)
class OutputLayer:
    """This rank's rows of the output layer.

    weight: [padded_vocab / tp, h].
    start: the token id of its first row.
    width: the number of rows that are tokens; padding never enters the partition function.
    group: the tensor-parallel ranks, ``None`` for one.
    overlapped: whether DDP reduces gradients during the backward pass; its hook then expects one.
    fp32: whether a product with bf16 hidden states becomes logits without rounding to bf16.
    """

    weight: Tensor
    start: int
    width: int
    temperature: float
    group: dist.ProcessGroup | None
    overlapped: bool
    fp32: bool

    @classmethod
    def of(
        cls,
        weight: Tensor,
        vocab_size: int,
        temperature: float = 1.0,
        group: dist.ProcessGroup | None = None,
        overlapped: bool = False,
        fp32: bool = False,
    ) -> OutputLayer:
        start = 0
        if group is not None:
            start = group.rank() * len(weight)
        return cls(
            weight=weight,
            start=start,
            width=max(0, min(len(weight), vocab_size - start)),
            temperature=temperature,
            group=group,
            overlapped=overlapped,
            fp32=fp32,
        )

    @property
    def tokens(self) -> Tensor:
        """Return the rows [width, h] without padding. A rank that has only padding returns one row,
        whose logits are not used.
        """
        return self.weight.detach()[: max(self.width, 1)]

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of the tokens ``ids`` among this rank's, and whether it has them. The
        column of a token that another rank has is 0.
        """
        local = ids - self.start
        here = (local >= 0) & (local < self.width)
        return torch.where(here, local, 0), here

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)


@dataclass(frozen=True)
class _Chunk:
    """Some ``rows`` of the hidden states and the shared buffer ``p`` [n, width], which holds their
    logits at first. ``target`` is the column of each row's token, and whether this rank has it.
    """

    rows: slice
    p: Tensor
    target: tuple[Tensor, Tensor]

    def gather_targets(self) -> Tensor:
        """Return the buffer at the targets [n], 0 for targets of other ranks."""
        column, here = self.target
        return here * self.p.gather(-1, column[:, None])[:, 0]

    def scatter_targets(self, at_target: Tensor) -> None:
        """Write ``at_target`` [n] to the buffer at the targets that this rank has."""
        column, here = self.target
        present = self.p.gather(-1, column[:, None])[:, 0]
        values = torch.where(here, at_target, present)
        self.p.scatter_(-1, column[:, None], values[:, None])

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield a few rows of the buffer at a time, with scratch space of their size."""
        count, width = self.p.shape
        if capabilities().separate_memory:
            size = -(-count // 8)
        else:
            size = min(count, max(1, BLOCK_ELEMENTS // width))
        scratch = torch.empty_like(self.p[:size])
        for start in range(0, count, size):
            stop = min(start + size, count)
            yield slice(start, stop), scratch[: stop - start]


def token_outputs(layer: OutputLayer, hidden: Tensor, targets: Tensor) -> TokenOutputs:
    """Return the outputs of the rows ``hidden`` [N, h] at the tokens ``targets`` int64 [N];
    differentiable in the rows and in the layer's weight. Collective.
    """
    logprobs, entropy = _TokenOutputs.apply(hidden, layer.weight, layer, targets)
    return TokenOutputs(logprobs=logprobs, entropy=entropy)


def fused_loss(
    layer: OutputLayer, hidden: Tensor, targets: Tensor, loss: PartLoss, upstream: float = 1.0
) -> tuple[Tensor, TokenOutputs]:
    """Return the sum of ``loss(rows, outputs)`` over the chunks of rows, and all outputs.
    Collective.

    The sum is differentiable in ``hidden`` [N, h] and in the layer's weight; the outputs are not.
    ``upstream`` is the gradient of the sum that the backward pass will be given. If the weight has
    a ``main_grad``, its gradient times ``upstream`` is added there at once.
    """
    total, logprobs, entropy = _FusedLoss.apply(
        hidden, layer.weight, layer, targets, loss, upstream
    )
    return total, TokenOutputs(logprobs=logprobs, entropy=entropy)


class _OutputContext(FunctionCtx):
    """What :class:`_TokenOutputs` leaves for its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    layer: OutputLayer
    targets: Tensor


class _LossContext(FunctionCtx):
    """What :class:`_FusedLoss` leaves for its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    weight: Tensor
    weight_gradient: Tensor | None
    upstream: float


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OutputContext, hidden: Tensor, weight: Tensor, layer: OutputLayer, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        buffers = _OutputBuffers.empty(targets)
        for chunk in _chunks(layer, hidden, targets):
            outputs, _, logsumexp = _forward(layer, chunk)
            buffers.fill(chunk, outputs, logsumexp)
        ctx.layer = layer
        ctx.targets = targets
        ctx.save_for_backward(hidden, buffers.logsumexp, buffers.logprobs, buffers.entropy)
        ctx.set_materialize_grads(False)
        return buffers.logprobs, buffers.entropy

    @staticmethod
    def backward(ctx: _OutputContext, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        hidden, logsumexp, logprobs, entropy = ctx.saved_tensors
        by_logprob, by_entropy = grads
        gradient = _Gradient.of(layer.weight, hidden)
        for chunk in _chunks(layer, hidden, ctx.targets):
            rows = chunk.rows
            for block, _ in chunk.blocks():
                chunk.p[block].sub_(logsumexp[rows][block, None]).exp_()
            _to_logit_gradient(
                layer=layer,
                chunk=chunk,
                total=torch.ones_like(logprobs[rows]),
                outputs=TokenOutputs(logprobs=logprobs[rows], entropy=entropy[rows]),
                by_logprob=None if by_logprob is None else by_logprob[rows],
                by_entropy=None if by_entropy is None else by_entropy[rows],
            )
            gradient.add(layer, chunk, hidden[rows])
        return gradient.hidden, gradient.for_weight(layer), None, None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _LossContext,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        targets: Tensor,
        loss: PartLoss,
        upstream: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        buffers = _OutputBuffers.empty(targets)
        gradient = _Gradient.of(weight, hidden)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for chunk in _chunks(layer, hidden, targets):
            outputs, sums, logsumexp = _forward(layer, chunk)
            buffers.fill(chunk, outputs, logsumexp)
            with torch.enable_grad():
                leaves = [outputs.logprobs.requires_grad_(), outputs.entropy.requires_grad_()]
                part = loss(chunk.rows, outputs)
                by_logprob, by_entropy = torch.autograd.grad(
                    part * upstream, leaves, allow_unused=True
                )
            total += part.detach()
            _to_logit_gradient(
                layer=layer,
                chunk=chunk,
                total=sums,
                outputs=TokenOutputs(
                    logprobs=outputs.logprobs.detach(), entropy=outputs.entropy.detach()
                ),
                by_logprob=by_logprob,
                by_entropy=by_entropy,
            )
            gradient.add(layer, chunk, hidden[chunk.rows])
        ctx.weight = weight
        ctx.weight_gradient = gradient.for_weight(layer)
        ctx.upstream = upstream
        ctx.save_for_backward(gradient.hidden)
        ctx.mark_non_differentiable(buffers.logprobs, buffers.entropy)
        return total, buffers.logprobs, buffers.entropy

    @staticmethod
    def backward(ctx: _LossContext, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        factor = grad / ctx.upstream
        (hidden,) = ctx.saved_tensors
        weight_gradient = ctx.weight_gradient
        ctx.weight_gradient = None  # autograd copies a tensor to which there is another reference
        if weight_gradient is not None and getattr(ctx.weight, "main_grad", None) is None:
            weight_gradient = weight_gradient.mul_(factor)
        return ((hidden * factor).to(hidden.dtype), weight_gradient, None, None, None, None)


def _chunks(layer: OutputLayer, hidden: Tensor, targets: Tensor) -> Iterator[_Chunk]:
    """Yield the logits of some rows at a time, all in the same buffer. How many does not depend on
    the padding, which not every tensor-parallel rank has: they reduce the same rows together.
    """
    count = len(hidden)
    tokens = layer.tokens
    columns = len(layer.weight)
    if capabilities().separate_memory:
        size = LOGITS_AT_ONCE // columns
    else:
        size = max(CHUNK_ROWS, 4 * BLOCK_ELEMENTS // columns)
    size = max(1, min(count, size))
    edges = [*range(0, count, size), count]
    buffer = torch.empty(size, len(tokens), dtype=torch.float32, device=hidden.device)
    for start, stop in itertools.pairwise(edges):
        z = buffer[: stop - start]
        rows = hidden[start:stop].detach()
        if hidden.dtype == z.dtype:
            torch.mm(rows, tokens.t(), out=z)
        elif layer.fp32:
            fp32_product(rows, tokens.t(), z)
        else:
            z.copy_(rows @ tokens.t())
        if layer.temperature != 1.0:
            z.div_(layer.temperature)
        if not layer.width:
            z.fill_(torch.finfo(z.dtype).min)
        yield _Chunk(rows=slice(start, stop), p=z, target=layer.columns(targets[start:stop]))


def _forward(layer: OutputLayer, chunk: _Chunk) -> tuple[TokenOutputs, Tensor, Tensor]:
    """Return the outputs of a chunk, the sum of its exp(z - maximum) and its logsumexp, each [n].

    The buffer then holds exp(z - maximum), except at the targets. The sum over the other tokens
    tells how far the probability of a nearly certain token is from 1, which 1 - p would round away.
    """
    z = chunk.p
    maximum = z.amax(-1)
    layer.all_reduce(maximum, dist.ReduceOp.MAX)
    n = len(z)
    sums = z.new_zeros(3 * n)
    sums[2 * n :] = chunk.gather_targets() - chunk.target[1] * maximum
    chunk.scatter_targets(z.new_full((n,), torch.finfo(z.dtype).min))
    for block, scratch in chunk.blocks():
        torch.sub(z[block], maximum[block, None], out=scratch)
        torch.exp(scratch, out=z[block])
        sums[:n][block] = z[block].sum(-1)
        sums[n : 2 * n][block] = scratch.mul_(z[block]).sum(-1)
    layer.all_reduce(sums, dist.ReduceOp.SUM)
    rest, weighted, target = sums.view(3, n)
    at_target = target.exp()
    total = rest + at_target
    weighted = weighted + at_target * target
    log = torch.where(target == 0, rest.log1p(), total.log())
    return TokenOutputs(target - log, log - weighted / total), total, maximum + log


def _to_logit_gradient(
    layer: OutputLayer,
    chunk: _Chunk,
    total: Tensor,
    outputs: TokenOutputs,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
) -> None:
    """Turn the buffer, which holds ``total`` [n] times the probabilities, into the loss's gradient
    in the unscaled logits. The values of the buffer at the targets do not matter.

    ``by_logprob`` and ``by_entropy`` are the gradients in the log-probs and entropies of
    ``outputs``, None if the loss does not depend on them.

    d log p(y) / dz_v = [v = y] - p_v ;  d H / dz_v = -p_v (log p_v + H)
    """
    p = chunk.p
    logprobs = outputs.logprobs
    entropy = outputs.entropy
    if by_logprob is None:
        by_logprob = torch.zeros_like(total)
    else:
        by_logprob = by_logprob / layer.temperature
    at_target = -by_logprob * logprobs.expm1()
    if by_entropy is None:
        for block, _ in chunk.blocks():
            p[block].mul_((-by_logprob / total)[block, None])
    else:
        by_entropy = by_entropy / layer.temperature
        at_target -= by_entropy * logprobs.exp() * (logprobs + entropy)
        shift = entropy - total.log()
        for block, scratch in chunk.blocks():
            torch.log(p[block], out=scratch)
            scratch.clamp_(min=-1e30)  # if p is 0, so is the product
            scratch.add_(shift[block, None])
            scratch.mul_(by_entropy[block, None])
            scratch.add_(by_logprob[block, None])
            p[block].mul_(scratch).div_(-total[block, None])
    chunk.scatter_targets(at_target)


def _add(sums: Tensor, product: Tensor) -> None:
    """Add a product of another type. Torch makes a copy in the sums' type first, so it is added a
    part at a time.
    """
    size = max(1, BLOCK_ELEMENTS // sums.shape[1])
    for start in range(0, len(sums), size):
        part = slice(start, start + size)
        sums[part] += product[part]


@dataclass(frozen=True)
class _OutputBuffers:
    """The outputs of all chunks together, [N] each."""

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor

    @classmethod
    def empty(cls, targets: Tensor) -> _OutputBuffers:
        new = partial(torch.empty, len(targets), dtype=torch.float32, device=targets.device)
        return cls(logprobs=new(), entropy=new(), logsumexp=new())

    def fill(self, chunk: _Chunk, outputs: TokenOutputs, logsumexp: Tensor) -> None:
        self.logprobs[chunk.rows] = outputs.logprobs
        self.entropy[chunk.rows] = outputs.entropy
        self.logsumexp[chunk.rows] = logsumexp


@dataclass(frozen=True)
class _Gradient:
    """The gradients in the hidden states [N, h] and in the weight. ``sums`` is Megatron's buffer,
    or a new one if the weight has none; None if the weight needs no gradient.
    """

    hidden: Tensor
    sums: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, hidden: Tensor) -> _Gradient:
        sums = None
        if weight.requires_grad:
            sums = getattr(weight, "main_grad", None)
            if sums is None:
                sums = torch.zeros_like(weight, dtype=torch.float32)
        return cls(hidden=torch.empty_like(hidden), sums=sums)

    def add(self, layer: OutputLayer, chunk: _Chunk, hidden: Tensor) -> None:
        dz = chunk.p.to(hidden.dtype)
        self.hidden[chunk.rows] = dz @ layer.tokens
        if self.sums is None:
            return
        sums = self.sums[: len(layer.tokens)]
        if sums.dtype == dz.dtype:
            sums.addmm_(dz.t(), hidden)
            return
        if capabilities().fp32_products:
            add_fp32_product(sums, dz.t(), hidden)
            return
        size = max(1, PRODUCT_ELEMENTS // sums.shape[1])
        for start in range(0, len(sums), size):
            part = slice(start, start + size)
            _add(sums[part], dz[:, part].t() @ hidden)

    def for_weight(self, layer: OutputLayer) -> Tensor | None:
        """Return the weight's gradient as autograd is to see it.

        If the gradient is in Megatron's buffer already, that is None, or a tensor of any value for
        the hook of an overlapped DDP, which drops it. The hook of a tied weight sees the gradient
        of the embedding.
        """
        if self.sums is None:
            return None
        if getattr(layer.weight, "main_grad", None) is None:
            return self.sums.to(layer.weight.dtype)
        if not layer.overlapped or getattr(layer.weight, "zero_out_wgrad", False):
            return None
        layer.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(layer.weight)
