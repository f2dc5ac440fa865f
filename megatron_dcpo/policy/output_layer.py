"""The output layer: from hidden states to log-probs, entropies and the loss's gradient. [tokens,
vocabulary] never exists.

With z the temperature-scaled logits, split over tensor-parallel ranks along the vocabulary:

    logsumexp(z) = m + log sum_ranks sum_local exp(z - m),  m = max over ranks
    log p(y)     = z_y - logsumexp(z)
    H            = logsumexp(z) - sum_v p_v z_v

The rows come in chunks, whose logits share one fp32 buffer; two all-reduces of a few numbers per
row. A loss that is a sum over tokens gets its gradient while the chunk's exp(z - m) is in the
buffer (:func:`fused_loss`: three products with the weight); any other needs all log-probs first,
and its backward pass makes the logits anew (:func:`token_outputs`: four). The weight's gradient is
added to Megatron's fp32 buffer where there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.runtime.device import capabilities, fp32_product
from megatron_dcpo.types import TokenOutputs

LOGITS_AT_ONCE = (
    1 << 26
)  # of a chunk on a GPU; fewer, and the weight's gradient is read and written too often
CHUNK_ROWS = 112  # at least, on a CPU, for the same reason; more where the vocabulary is small
BLOCK_ELEMENTS = (
    1 << 19
)  # of which a CPU works on so many at a time, which stay in its cache; a GPU on an eighth
PRODUCT_ELEMENTS = (
    1 << 23
)  # of the weight's gradient, where a product has another type than the sum

PartLoss = Callable[[slice, "TokenOutputs"], Tensor]


@dataclass(frozen=True)
class OutputLayer:
    """This rank's rows of the output layer. ``weight`` [padded_vocab / tp, h]; the first ``width``
    rows are tokens, from id ``start``; padding never enters the partition function. ``group``: the
    tensor-parallel ranks, ``None`` for one. ``overlapped``: DDP reduces gradients while the
    backward pass goes on, and its hook wants to see one. ``fp32``: the product with hidden states
    in bf16 is not rounded to bf16 before it becomes logits.
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
        start = (group.rank() if group is not None else 0) * len(weight)
        width = max(0, min(len(weight), vocab_size - start))
        return cls(
            weight=weight,
            start=start,
            width=width,
            temperature=temperature,
            group=group,
            overlapped=overlapped,
            fp32=fp32,
        )

    @property
    def tokens(self) -> Tensor:
        """Return [width, h] without padding; a rank of padding alone has one row, of which nothing
        is asked.
        """
        return self.weight.detach()[: max(self.width, 1)]

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where ``ids`` stand among this rank's tokens, and whether they do (0 and False
        elsewhere).
        """
        local = ids - self.start
        here = (local >= 0) & (local < self.width)
        return torch.where(here, local, 0), here

    def all_reduce(self, x: Tensor, op: Any) -> None:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)


@dataclass(frozen=True)
class _Chunk:
    """Rows ``rows`` of the hidden states. ``p`` [n, width]: the shared buffer, of logits at first.
    ``target``: the column of each row's token, and whether it is this rank's.
    """

    rows: slice
    p: Tensor
    target: tuple[Tensor, Tensor]

    def gather_targets(self) -> Tensor:
        """Return the buffer at the targets [n], 0 where they are another rank's."""
        target, here = self.target
        return here * self.p.gather(-1, target[:, None])[:, 0]

    def scatter_targets(self, at_target: Tensor) -> None:
        """Write to the buffer at the targets [n], where they are this rank's."""
        target, here = self.target
        now = self.p.gather(-1, target[:, None])[:, 0]
        self.p.scatter_(-1, target[:, None], torch.where(here, at_target, now)[:, None])

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield a few rows of the buffer at a time, and as much to write to."""
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
    return TokenOutputs(*_TokenOutputs.apply(hidden, layer.weight, layer, targets))


def fused_loss(
    layer: OutputLayer, hidden: Tensor, targets: Tensor, loss: PartLoss, upstream: float = 1.0
) -> tuple[Tensor, TokenOutputs]:
    """Return the sum of ``loss(rows, outputs)`` over the chunks of rows, and all outputs.
    Collective.

    The sum is differentiable in ``hidden`` [N, h] and the layer's weight; the outputs are not.
    ``upstream``: the gradient that the backward pass will bring for the sum. A weight with a
    ``main_grad`` gets its gradient added there at once, with that factor.
    """
    total, *outputs = _FusedLoss.apply(hidden, layer.weight, layer, targets, loss, upstream)
    return total, TokenOutputs(*outputs)


class _TokenOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, layer: OutputLayer, targets: Tensor
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer: OutputLayer = ctx.layer
        hidden, logsumexp, logprobs, entropy = ctx.saved_tensors
        gradient = _Gradient.of(layer.weight, hidden)
        for chunk in _chunks(layer, hidden, ctx.targets):
            rows = chunk.rows
            for block, _ in chunk.blocks():
                chunk.p[block].sub_(logsumexp[rows][block, None]).exp_()
            parts = [g if g is None else g[rows] for g in grads]
            _to_logit_gradient(
                layer=layer,
                chunk=chunk,
                total=torch.ones_like(logprobs[rows]),
                logprobs=logprobs[rows],
                entropy=entropy[rows],
                grads=parts,
            )
            gradient.add(layer, chunk, hidden[rows])
        return gradient.hidden, gradient.for_weight(layer), None, None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
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
                grads = torch.autograd.grad(part * upstream, leaves, allow_unused=True)
            total += part.detach()
            _to_logit_gradient(
                layer=layer,
                chunk=chunk,
                total=sums,
                logprobs=outputs.logprobs.detach(),
                entropy=outputs.entropy.detach(),
                grads=grads,
            )
            gradient.add(layer, chunk, hidden[chunk.rows])
        ctx.weight = weight
        ctx.weight_gradient = gradient.for_weight(layer)
        ctx.upstream = upstream
        ctx.save_for_backward(gradient.hidden)
        ctx.mark_non_differentiable(buffers.logprobs, buffers.entropy)
        return total, buffers.logprobs, buffers.entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        factor = grad / ctx.upstream
        (hidden,) = ctx.saved_tensors
        weight, ctx.weight_gradient = (
            ctx.weight_gradient,
            None,
        )  # autograd copies what somebody else holds
        if weight is not None and getattr(ctx.weight, "main_grad", None) is None:
            weight = weight.mul_(factor)
        return (hidden * factor).to(hidden.dtype), weight, None, None, None, None


def _chunks(layer: OutputLayer, hidden: Tensor, targets: Tensor) -> Iterator[_Chunk]:
    """Yield the logits of some rows at a time, all in the same buffer."""
    count = len(hidden)
    tokens = layer.tokens
    enough = max(CHUNK_ROWS, 4 * BLOCK_ELEMENTS // len(tokens))
    if capabilities().separate_memory:
        size = LOGITS_AT_ONCE // len(tokens)
    else:
        size = enough
    size = max(1, min(count, size))
    edges = [*range(0, count, size), count]
    buffer = torch.empty(size, len(tokens), dtype=torch.float32, device=hidden.device)
    for start, stop in itertools.pairwise(edges):
        z = buffer[: stop - start]
        if hidden.dtype == z.dtype:
            torch.mm(hidden[start:stop].detach(), tokens.t(), out=z)
        elif layer.fp32:
            fp32_product(hidden[start:stop].detach(), tokens.t(), z)
        else:
            z.copy_(hidden[start:stop].detach() @ tokens.t())
        if layer.temperature != 1.0:
            z.div_(layer.temperature)
        if not layer.width:
            z.fill_(torch.finfo(z.dtype).min)
        rows = slice(start, stop)
        yield _Chunk(
            rows=rows,
            p=z,
            target=layer.columns(targets[rows]),
        )


def _forward(layer: OutputLayer, chunk: _Chunk) -> tuple[TokenOutputs, Tensor, Tensor]:
    """Return the outputs of a chunk, the sum of its exp(z - maximum) and its logsumexp [n].

    Leaves exp(z - maximum) in the buffer, but at the targets: without them the sum tells how much a
    sure token lacks, which 1 - p would round away.
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
    layer: OutputLayer, chunk: _Chunk, total: Tensor, logprobs: Tensor, entropy: Tensor, grads: Any
) -> None:
    """Turn the buffer, ``total`` [n] times the probabilities, into the loss's gradient in the
    unscaled logits.

    ``grads``: in log-probs and entropies; None where the loss does not depend on them. What the
    buffer has at the targets does not matter.

    d log p(y) / dz_v = [v = y] - p_v ;  d H / dz_v = -p_v (log p_v + H)
    """
    p = chunk.p
    by_logprob, by_entropy = (None if g is None else g / layer.temperature for g in grads)
    if by_logprob is None:
        by_logprob = torch.zeros_like(total)
    at_target = -by_logprob * logprobs.expm1()
    if by_entropy is None:
        for block, _ in chunk.blocks():
            p[block].mul_((-by_logprob / total)[block, None])
    else:
        at_target -= by_entropy * logprobs.exp() * (logprobs + entropy)
        shift = entropy - total.log()
        for block, scratch in chunk.blocks():
            torch.log(p[block], out=scratch).clamp_(min=-1e30)  # where p is 0 the product is
            scratch.add_(shift[block, None]).mul_(by_entropy[block, None]).add_(
                by_logprob[block, None]
            )
            p[block].mul_(scratch).div_(-total[block, None])
    chunk.scatter_targets(at_target)


@dataclass(frozen=True)
class _OutputBuffers:
    """The outputs of all chunks side by side, [N] each."""

    logprobs: Tensor
    entropy: Tensor
    logsumexp: Tensor

    @classmethod
    def empty(cls, targets: Tensor) -> _OutputBuffers:
        return cls(
            *(
                torch.empty(len(targets), dtype=torch.float32, device=targets.device)
                for _ in range(3)
            )
        )

    def fill(self, chunk: _Chunk, outputs: TokenOutputs, logsumexp: Tensor) -> None:
        self.logprobs[chunk.rows] = outputs.logprobs
        self.entropy[chunk.rows] = outputs.entropy
        self.logsumexp[chunk.rows] = logsumexp


@dataclass(frozen=True)
class _Gradient:
    """Of the hidden states [N, h], and of the weight: ``sums`` is Megatron's buffer, or one of our
    own.
    """

    hidden: Tensor
    sums: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, hidden: Tensor) -> _Gradient:
        sums = None
        if weight.requires_grad:
            main = getattr(weight, "main_grad", None)
            if main is None:
                sums = torch.zeros_like(weight, dtype=torch.float32)
            else:
                sums = main
        return cls(torch.empty_like(hidden), sums)

    def add(self, layer: OutputLayer, chunk: _Chunk, hidden: Tensor) -> None:
        dz = chunk.p.to(hidden.dtype)
        self.hidden[chunk.rows] = dz @ layer.tokens
        if self.sums is None:
            return
        sums = self.sums[: len(layer.tokens)]
        if sums.dtype == dz.dtype:
            sums.addmm_(dz.t(), hidden)
            return
        size = max(1, PRODUCT_ELEMENTS // sums.shape[1])
        for start in range(0, len(sums), size):
            sums[start : start + size] += dz[:, start : start + size].t() @ hidden

    def for_weight(self, layer: OutputLayer) -> Tensor | None:
        """Return what autograd is told. Where the gradient is in Megatron's buffer already it is
        nothing, or for DDP's hook, which drops it, one of any value; a tied weight's hook sees the
        embedding's.
        """
        if self.sums is not None and getattr(layer.weight, "main_grad", None) is None:
            return self.sums.to(layer.weight.dtype)
        if (
            self.sums is None
            or not layer.overlapped
            or getattr(layer.weight, "zero_out_wgrad", False)
        ):
            return None
        layer.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.empty_like(layer.weight)
