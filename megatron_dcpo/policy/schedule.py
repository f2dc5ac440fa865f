"""Forward and backward through Megatron's own schedules, with a loss on the response tokens of each
micro-batch.

How the loss is scaled. The token losses carry their global denominators already, so the loss of an
optimizer step is the plain sum over all tokens of all micro-batches and data-parallel ranks.
Megatron's schedules divide by ``num_tokens`` and by the number of micro-batches, and DDP averages
over data- and context-parallel ranks; the closure returns ``num_tokens = 1`` and multiplies the
other two back (``forward_step_calc_loss`` in ``megatron/core/pipeline_parallel/schedules.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

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

# -> (contributions of the tokens [n], sums over them; of a part of a micro-batch nobody reads the
# sums)
Loss = Callable[[MicroBatch, TokenOutputs], tuple[Tensor, dict[str, Tensor]]]


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
    """Run one forward-backward over all micro-batches: gradients are left in the DDP buffers,
    reduced over ranks.

    ``separable``: a token's contribution depends on its own outputs alone; the loss is then called
    on parts of a micro-batch as well, and the output layer is passed once, not twice. Returns the
    statistics of each micro-batch, ``loss`` (the sum of its contributions) among them, on the last
    pipeline stage, nothing on the others.
    """
    # What is left of the factor below when the schedule has divided; gradients of a frozen policy's
    # adapter are sums.
    if policy.frozen:
        upstream = 1
    else:
        upstream = policy.topology.dp_size * policy.topology.cp_size
    scale = len(splits) * upstream

    def loss_closure(batch: MicroBatch, output: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
        local = batch.local()
        layer, hidden = _output_layer(
            policy=policy,
            batch=local,
            output=output,
            temperature=temperature,
        )
        if separable and hidden.requires_grad:
            part = lambda rows, outputs: loss(local.part(rows), outputs)[0].sum()  # noqa: E731
            total, outputs = fused_loss(
                layer=layer,
                hidden=hidden,
                targets=local.targets,
                loss=part,
                upstream=upstream,
            )
            outputs = _gather_over_context_parallel(policy, batch, outputs)
            with torch.no_grad():
                contributions, statistics = loss(batch, outputs)
        else:
            outputs = _gather_over_context_parallel(
                policy, batch, token_outputs(layer, hidden, local.targets)
            )
            contributions, statistics = loss(batch, outputs)
            total = contributions.sum()
        statistics = {"loss": contributions.detach().sum(), **statistics}
        values = torch.stack(
            [value.double() for value in statistics.values()]
        ).tolist()  # one wait for the device
        one = torch.ones((), dtype=torch.int, device=hidden.device)
        return total * scale, one, dict(zip(statistics, values, strict=True))

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
        outputs = token_outputs(
            *_output_layer(
                policy=policy,
                batch=local,
                output=output,
                temperature=temperature,
            ),
            local.targets,
        )
        logprobs = _gather_over_context_parallel(policy, batch, outputs).logprobs
        counts = [len(sample.response_ids) for sample in batch.samples]
        return [piece.cpu().numpy() for piece in logprobs.split(counts)]

    return _in_order(
        policy,
        splits,
        _run(
            policy=policy,
            samples=samples,
            splits=splits,
            closure=collect,
            packing=packing,
            forward_only=True,
        ),
    )


def _in_order(policy: Policy, splits: Sequence[Sequence[int]], parts: list[list[Any]]) -> list[Any]:
    """Return on every stage what the last stage made of every sample. ``parts``: by micro-batch, as
    ``splits``.
    """
    pairs = zip(splits, broadcast_from_last_stage(policy, parts), strict=True)
    found = {index: piece for rows, part in pairs for index, piece in zip(rows, part, strict=True)}
    return [found[index] for index in range(len(found))]


def broadcast_from_last_stage(policy: Policy, value: Any) -> Any:
    """Return ``value`` of the last pipeline stage on every stage."""
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
    if policy.config.sequence_parallel:
        multiple = policy.topology.tp_size
    else:
        multiple = 1
    place = policy.topology.cp_rank, policy.topology.cp_size
    uniform = len(policy.chunks) > 1
    shapes = partial(
        collate,
        packing=packing,
        multiple_of=multiple,
        uniform=uniform,
        for_loss=not forward_only,
        context_parallel=place,
    )
    batches = [shapes(samples, splits) for _ in policy.chunks]
    longest = max(map(sequence_length, samples), default=1)
    found: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(
            _forward_step, closure, {"fp32_output": False} if policy.config.bf16 else {}
        ),
        data_iterator=batches if len(batches) > 1 else batches[0],
        model=list(policy.chunks),
        num_microbatches=len(splits),
        seq_length=longest,  # the schedules only use it when sequence lengths are fixed
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    if any(sample.response.experts is not None for sample in samples):
        end_replay(policy.chunks)
    return found


def _forward_step(
    closure: Callable[..., Any], options: dict[str, Any], batches: Iterator[MicroBatch], model: Any
) -> tuple[Tensor, Any]:
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
        outputs=outputs,
        here=batch.here,
        count=len(batch.targets),
        group=policy.topology.cp_group,
    )


def _output_layer(
    policy: Policy, batch: MicroBatch, output: Tensor, temperature: float
) -> tuple[OutputLayer, Tensor]:
    """Return the output layer, and for it the hidden states [N, h] that score the response tokens.

    ``output``: the last stage's hidden states [b, s, h], [b, s / tp, h] under sequence parallelism.
    Each tensor-parallel rank has the gradient of its own part of the vocabulary; their sum is taken
    on the way back.
    """
    group = policy.topology.tp_group
    if policy.config.sequence_parallel:
        output = gather_from_sequence_parallel_region(
            output.transpose(0, 1), group=group
        ).transpose(0, 1)
    hidden = output.reshape(-1, output.shape[-1]).index_select(0, batch.rows)
    if not policy.config.sequence_parallel:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    overlapped = policy.config.no_sync_func is not None
    size = policy.arch.vocab_size
    fp32 = policy.fp32_head
    return OutputLayer.of(
        weight=policy.output_weight,
        vocab_size=size,
        temperature=temperature,
        group=group,
        overlapped=overlapped,
        fp32=fp32,
    ), hidden
