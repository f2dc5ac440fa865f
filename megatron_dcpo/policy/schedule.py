"""Forward and backward passes through Megatron's own schedules, with a loss on the response tokens
of each micro-batch.

How the loss is scaled: the losses of the tokens already carry their global denominators, so the
loss of an optimizer step is the plain sum over all tokens of all micro-batches and data-parallel
ranks. Megatron's schedules divide by ``num_tokens`` and by the number of micro-batches, and DDP
averages over data- and context-parallel ranks. The closure returns ``num_tokens = 1`` and
multiplies by the other two (``forward_step_calc_loss`` in
``megatron/core/pipeline_parallel/schedules.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_dcpo.policy.batching import collate, sequence_length
from megatron_dcpo.policy.context_parallel import gather_over_context_parallel
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.output_layer import OutputLayer, fused_loss, token_outputs
from megatron_dcpo.policy.routing_replay import end_replay, replayed
from megatron_dcpo.types import MicroBatch, TokenOutputs, TrainingSample

from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

# Returns the contributions of the tokens [n] and statistics, which are sums over the tokens. The
# statistics of a part of a micro-batch are not read.
Loss = Callable[[MicroBatch, TokenOutputs], tuple[Tensor, dict[str, Tensor]]]
Value = TypeVar("Value")


def accumulate_gradients(
    policy: Policy,
    samples: Sequence[TrainingSample],
    splits: Sequence[Sequence[int]],
    loss: Loss,
    *,
    temperature: float,
    packing: bool,
    separable: bool = False,
) -> list[dict[str, float]]:
    """Run one forward-backward over all micro-batches. The gradients are left in the DDP buffers,
    reduced over ranks.

    If the loss is ``separable``, a token's contribution depends on its own outputs alone. The loss
    is then also called on parts of a micro-batch, and the output layer is passed once, not twice.
    Returns the statistics of each micro-batch on the last pipeline stage, with ``loss`` (the sum of
    its contributions) among them, and nothing on the other stages.
    """
    # The part of the factor below that remains when the schedule has divided. The gradients of a
    # frozen policy's adapter are sums over ranks.
    upstream = 1
    if not policy.frozen:
        upstream = policy.topology.dp_size * policy.topology.cp_size
    scale = len(splits) * upstream

    def loss_closure(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
        local = batch.local()
        layer, hidden = _output_layer(
            policy=policy, batch=local, output=output, temperature=temperature
        )
        if separable and hidden.requires_grad:

            def loss_of_rows(rows: slice, outputs: TokenOutputs) -> Tensor:
                contributions, _ = loss(local.part(rows), outputs)
                return contributions.sum()

            total, local_outputs = fused_loss(
                layer=layer,
                hidden=hidden,
                targets=local.targets,
                loss=loss_of_rows,
                upstream=upstream,
            )
            outputs = _gather_over_context_parallel(policy, batch, local_outputs)
            with torch.no_grad():
                contributions, statistics = loss(batch, outputs)
        else:
            local_outputs = token_outputs(layer, hidden, local.targets)
            outputs = _gather_over_context_parallel(policy, batch, local_outputs)
            contributions, statistics = loss(batch, outputs)
            total = contributions.sum()
        statistics = {"loss": contributions.detach().sum(), **statistics}
        stacked = torch.stack([value.double() for value in statistics.values()])
        values = stacked.tolist()  # the only wait for the device
        num_tokens = torch.ones((), dtype=torch.int, device=hidden.device)
        return total * scale, num_tokens, dict(zip(statistics, values, strict=True))

    return _run(
        policy=policy,
        samples=samples,
        splits=splits,
        closure=loss_closure,
        packing=packing,
        forward_only=False,
    )


@torch.no_grad()
def compute_logprobs(
    policy: Policy,
    samples: Sequence[TrainingSample],
    splits: Sequence[Sequence[int]],
    *,
    temperature: float,
    packing: bool,
) -> list[np.ndarray]:
    """Return log-probs float32 [T_i] of every sample's response tokens, on every rank of the
    replica.
    """

    def collect(batch: MicroBatch, output: Tensor, non_loss_data: bool = True) -> list[np.ndarray]:
        local = batch.local()
        layer, hidden = _output_layer(
            policy=policy, batch=local, output=output, temperature=temperature
        )
        outputs = token_outputs(layer, hidden, local.targets)
        logprobs = _gather_over_context_parallel(policy, batch, outputs).logprobs
        counts = [len(sample.response_ids) for sample in batch.samples]
        return [piece.cpu().numpy() for piece in logprobs.split(counts)]

    by_micro_batch = _run(
        policy=policy,
        samples=samples,
        splits=splits,
        closure=collect,
        packing=packing,
        forward_only=True,
    )
    by_sample = {}
    by_micro_batch = broadcast_from_last_stage(policy, by_micro_batch)
    for indices, pieces in zip(splits, by_micro_batch, strict=True):
        for index, piece in zip(indices, pieces, strict=True):
            by_sample[index] = piece
    return [by_sample[index] for index in range(len(by_sample))]


def broadcast_from_last_stage(policy: Policy, value: Value) -> Value:
    """Return on every pipeline stage the ``value`` of the last one."""
    if policy.topology.pp_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(
        box, group=policy.topology.pp_group, group_src=policy.topology.pp_size - 1
    )
    return box[0]


def _run(
    policy: Policy,
    samples: Sequence[TrainingSample],
    splits: Sequence[Sequence[int]],
    closure: Callable[..., Any],
    packing: bool,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's schedule over the micro-batches. Return what ``closure`` returned for each of
    them on the last stage, nothing on the other stages.
    """
    multiple_of = 1
    if policy.config.sequence_parallel:
        multiple_of = policy.topology.tp_size
    micro_batches = partial(
        collate,
        samples,
        splits,
        packing=packing,
        multiple_of=multiple_of,
        uniform=len(policy.chunks) > 1,
        for_loss=not forward_only,
        context_parallel=(policy.topology.cp_rank, policy.topology.cp_size),
    )
    iterators = [micro_batches() for _ in policy.chunks]
    options = {}
    if policy.config.bf16:
        options = {"fp32_output": False}
    longest = max(map(sequence_length, samples), default=1)
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, closure, options),
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(policy.chunks),
        num_microbatches=len(splits),
        seq_length=longest,  # the schedules only use it if sequence lengths are fixed
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    if any(sample.response.experts is not None for sample in samples):
        end_replay(policy.chunks)
    return results


def _forward_step(
    closure: Callable[..., Any],
    options: dict[str, bool],
    batches: Iterator[MicroBatch],
    model: Module,
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(batches)
    with replayed(model, batch.experts):
        output = model(
            batch.tokens,
            batch.position_ids,
            None,
            packed_seq_params=batch.packed_seq_params,
            **options,
        )
    return output, partial(closure, batch)


def _gather_over_context_parallel(
    policy: Policy, batch: MicroBatch, outputs: TokenOutputs
) -> TokenOutputs:
    """Return the outputs of all response tokens from those of this context-parallel rank."""
    if batch.here is None:
        return outputs
    return gather_over_context_parallel(
        outputs=outputs, here=batch.here, count=len(batch.targets), group=policy.topology.cp_group
    )


def _output_layer(
    policy: Policy, batch: MicroBatch, output: Tensor, temperature: float
) -> tuple[OutputLayer, Tensor]:
    """Return the output layer and the hidden states [N, h] that score the response tokens.

    ``output`` holds the hidden states of the last stage, [b, s, h], or [b, s / tp, h] under
    sequence parallelism. Each tensor-parallel rank has the gradient of its own part of the
    vocabulary; the backward pass sums them.
    """
    group = policy.topology.tp_group
    if policy.config.sequence_parallel:
        gathered = gather_from_sequence_parallel_region(output.transpose(0, 1), group=group)
        output = gathered.transpose(0, 1)
    hidden = output.reshape(-1, output.shape[-1]).index_select(0, batch.rows)
    if not policy.config.sequence_parallel:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    layer = OutputLayer.of(
        weight=policy.output_weight,
        vocab_size=policy.arch.vocab_size,
        temperature=temperature,
        group=group,
        overlapped=policy.config.no_sync_func is not None,
        fp32=policy.fp32_head,
    )
    return layer, hidden
