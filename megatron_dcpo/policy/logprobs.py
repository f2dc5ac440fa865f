"""Token log-probabilities and entropies from vocabulary-parallel logits. No rank ever sees the whole vocabulary.

With z the temperature-scaled logits, split over tensor-parallel ranks along the vocabulary:

    logsumexp(z) = m + log sum_ranks sum_local exp(z - m),  m = max over ranks
    log p(y)     = z_y - logsumexp(z)
    H            = logsumexp(z) - sum_v p_v z_v

Three all-reduces of one number per token (four with entropy). Softmax runs in fp32 in chunks of rows, and is
recomputed in the backward pass instead of being kept: the only [tokens, vocab] tensor alive is the logits themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 26  # fp32 elements of one chunk of rows: 256 MiB


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        vocab_start: int,
        vocab_stop: int,
        temperature: float,
        with_entropy: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        # Padding columns beyond the true vocabulary are cut off: they must not enter the partition function.
        width = max(0, min(logits.shape[-1], vocab_stop - vocab_start))
        local = targets - vocab_start
        mine = (local >= 0) & (local < width)
        index = torch.where(mine, local, 0)
        n = logits.shape[0]
        maximum = torch.full((n,), -torch.inf, dtype=torch.float32, device=logits.device)
        if width:
            maximum = logits[:, :width].amax(-1).float() / temperature
        _all_reduce(maximum, dist.ReduceOp.MAX, group)
        # rows: sum of exp, target logit, sum of exp * z; shifted by the maximum
        sums = torch.zeros(3, n, dtype=torch.float32, device=logits.device)
        for rows in _chunks(n, width):
            z = (logits[rows, :width].float() / temperature).sub_(maximum[rows, None])
            exp = z.exp()
            sums[0, rows] = exp.sum(-1)
            sums[1, rows] = torch.where(mine[rows], z.gather(-1, index[rows, None]).squeeze(-1), 0.0)
            if with_entropy:
                sums[2, rows] = z.mul_(exp).sum(-1)
            del z, exp
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        lse = sums[0].log()
        logprobs = sums[1] - lse
        entropy = lse - sums[2] / sums[0] if with_entropy else torch.zeros_like(lse)
        ctx.save_for_backward(logits, index, mine, maximum + lse, entropy)
        ctx.width, ctx.temperature = width, temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, index, mine, lse, entropy = ctx.saved_tensors
        grad_logprob, grad_entropy = grads
        width, temperature = ctx.width, ctx.temperature
        grad = torch.zeros_like(logits)
        for rows in _chunks(logits.shape[0], width):
            logp = (logits[rows, :width].float() / temperature).sub_(lse[rows, None])
            p = logp.exp()
            # d log p(y) / dz_v = [v = y] - p_v ;  d H / dz_v = -p_v (log p_v + H)
            if grad_logprob is None:
                g = torch.zeros_like(p)
            else:
                g = p * -grad_logprob[rows, None]
                g.scatter_add_(-1, index[rows, None], (grad_logprob[rows] * mine[rows])[:, None])
            if grad_entropy is not None:
                g -= logp.add_(entropy[rows, None]).mul_(p).mul_(grad_entropy[rows, None])
            grad[rows, :width] = g.div_(temperature)  # copied into the type of grad
            del logp, p, g  # three chunks at a time, not four
        return grad, None, None, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """Sum of the ranks' parts. Each rank's gradient is its own part's, since all of them compute the same loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        x = x.clone()
        _all_reduce(x, dist.ReduceOp.SUM, group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _all_reduce(x: Tensor, op: Any, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(x, op=op, group=group)


def _chunks(n: int, width: int) -> list[slice]:
    if not n or not width:
        return []
    size = max(1, _CHUNK_ELEMENTS // width)
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of ``targets`` [N] (nats, fp32 [N]) and entropy [N] (zeros unless asked for).

    ``logits``: this rank's [N, padded_vocab / tp] columns; ``vocab_size``: the true vocabulary, so that padding columns
    have probability zero. Differentiable in both outputs. ``group``: the tensor-parallel group, ``None`` for one rank.
    """
    rank = group.rank() if group is not None else 0
    start = rank * logits.shape[-1]
    return _VocabParallel.apply(logits, targets, start, vocab_size, temperature, with_entropy, group)


def candidate_logprobs(
    logits: Tensor,
    targets: Tensor,
    logprobs: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Log-probabilities [m, K] of other tokens at some of the positions; -inf where ``token_ids`` is -1.

    ``logits``, ``targets`` and ``logprobs`` as :func:`vocab_parallel_logprobs` takes and gives them; ``rows`` int64 [m]
    into them, ``token_ids`` int64 [m, K]. log p(a) = log p(y) + z_a - z_y: the partition function is known,
    so all it takes is one all-reduce of the logits asked for. Differentiable in ``logits`` and ``logprobs``.
    """
    start = (group.rank() if group is not None else 0) * logits.shape[-1]
    ids = torch.cat([targets[rows, None], token_ids], dim=-1)
    local = ids - start
    mine = (local >= 0) & (local < logits.shape[-1]) & (ids >= 0)
    z = logits[rows].gather(-1, torch.where(mine, local, 0)).float()
    z = _SumOverRanks.apply(torch.where(mine, z, 0.0), group) / temperature
    return (logprobs[rows, None] + z[:, 1:] - z[:, :1]).masked_fill(token_ids < 0, -torch.inf)
