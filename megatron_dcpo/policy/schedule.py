"""Forward and backward through Megatron's own schedules, with a loss on the response tokens of each micro-batch.

How the loss is scaled. The token losses carry their global denominators already, so the loss of an optimizer step is the
plain sum over all tokens of all micro-batches and data-parallel ranks. Megatron's schedules divide by ``num_tokens`` and
by the number of micro-batches, and DDP averages over data-parallel ranks; the closure returns ``num_tokens = 1`` and
multiplies the other two back (``forward_step_calc_loss`` in ``megatron/core/pipeline_parallel/schedules.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo.policy.batching import Candidates, MicroBatch, TokenSequence, collate, sequence_length
from megatron_dcpo.policy.logprobs import candidate_logprobs, vocab_parallel_logprobs
from megatron_dcpo.policy.model import Policy

from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip


@dataclass(frozen=True)
class TokenOutputs:
    """What the policy says of the N response tokens of a micro-batch: ``logprobs`` [N], ``entropy`` [N], and
    ``candidate_logprobs`` [m, K] where the micro-batch has ``candidates``. Natural log, fp32, differentiable."""

    logprobs: Tensor
    entropy: Tensor
    candidate_logprobs: Tensor | None = None


# -> (sum of weighted token losses, statistics that add up)
LossFunction = Callable[[MicroBatch, TokenOutputs], tuple[Tensor, dict[str, float]]]


def accumulate_gradients(
    policy: Policy,
    samples: Sequence[TokenSequence],
    splits: Sequence[Sequence[int]],
    loss_function: LossFunction,
    *,
    temperature: float,
    packing: bool,
    candidates: Callable[[Sequence[Any]], Candidates | None] | None = None,
) -> list[dict[str, float]]:
    """One forward-backward over all micro-batches: gradients are left in the DDP buffers, reduced over ranks.

    ``candidates``: as :func:`collate` takes it. Returns the statistics of each micro-batch on the last pipeline stage,
    nothing on the others.
    """
    scale = len(splits) * policy.topology.dp_size

    def loss_closure(batch: MicroBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        selected = logits.reshape(-1, logits.shape[-1]).index_select(0, batch.rows)
        logprobs, entropy = _response_logprobs(policy, batch, selected, temperature, True)
        others = None
        if batch.candidates is not None:
            rows, ids, group = batch.candidates.rows, batch.candidates.token_ids, policy.topology.tp_group
            others = candidate_logprobs(
                selected, batch.targets, logprobs, rows, ids, temperature=temperature, group=group
            )
        loss, stats = loss_function(batch, TokenOutputs(logprobs, entropy, others))
        # The empty product keeps a micro-batch without response tokens attached to the graph.
        return loss * scale + logits.sum() * 0.0, torch.ones((), dtype=torch.int, device=logits.device), stats

    return _run(policy, samples, splits, loss_closure, packing, forward_only=False, candidates=candidates)


@torch.no_grad()
def compute_logprobs(
    policy: Policy,
    samples: Sequence[TokenSequence],
    splits: Sequence[Sequence[int]],
    *,
    temperature: float,
    packing: bool,
) -> list[np.ndarray]:
    """Log-probs float32 [T_i] of every sample's response tokens, on every rank of the replica."""

    def collect(batch: MicroBatch, logits: Tensor, non_loss_data: bool = True) -> list[np.ndarray]:
        selected = logits.reshape(-1, logits.shape[-1]).index_select(0, batch.rows)
        logprobs, _ = _response_logprobs(policy, batch, selected, temperature, False)
        counts = [len(sample.response_ids) for sample in batch.samples]
        return [piece.cpu().numpy() for piece in logprobs.split(counts)]

    pieces_of_batches = broadcast_from_last_stage(
        policy, _run(policy, samples, splits, collect, packing, forward_only=True)
    )
    result: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
    for members, pieces in zip(splits, pieces_of_batches, strict=True):
        for index, piece in zip(members, pieces, strict=True):
            result[index] = piece
    return result


def broadcast_from_last_stage(policy: Policy, value: Any) -> Any:
    """``value`` of the last pipeline stage, on every stage."""
    if policy.topology.pp_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=policy.topology.pp_group, group_src=policy.topology.pp_size - 1)
    return box[0]


def _run(
    policy: Policy,
    samples: Sequence[TokenSequence],
    splits: Sequence[Sequence[int]],
    closure: Callable[..., Any],
    packing: bool,
    forward_only: bool,
    candidates: Callable[[Sequence[Any]], Candidates | None] | None = None,
) -> list[Any]:
    multiple = policy.topology.tp_size if policy.config.sequence_parallel else 1
    shapes = partial(
        collate, packing=packing, multiple_of=multiple, uniform=len(policy.chunks) > 1, candidates=candidates
    )
    batches = [shapes(samples, splits) for _ in policy.chunks]
    longest = max(map(sequence_length, samples), default=1)
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, closure),
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=list(policy.chunks),
        num_microbatches=len(splits),
        seq_length=longest,  # the schedules only use it when sequence lengths are fixed
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _forward_step(closure: Callable[..., Any], batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    output = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
    return output, partial(closure, batch)


def _response_logprobs(
    policy: Policy, batch: MicroBatch, selected: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Logits [N, padded_vocab / tp] that score the response tokens -> their log-probs and entropy [N]."""
    return vocab_parallel_logprobs(
        selected,
        batch.targets,
        vocab_size=policy.arch.vocab_size,
        temperature=temperature,
        with_entropy=with_entropy,
        group=policy.topology.tp_group,
    )
