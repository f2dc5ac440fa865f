"""Advice on a plan that does not fit, and the whole plan as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, Literal

from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.lead import lead_of
from megatron_dcpo.planning.machine import GB
from megatron_dcpo.planning.plan import Plan, Stage, make_plan
from megatron_dcpo.weights.pipeline import layers_per_stage
from megatron_dcpo.weights.table import number_of_parameters


def advice(plan: Plan) -> list[str]:
    """Return the changes that would help, the cheapest first; nothing if the plan fits."""
    if plan.fits:
        return []
    changes = []
    limit = (plan.machine.gpu_memory_gb - plan.machine.reserve_gb) * GB
    if plan.rollout_bytes > limit:
        if not plan.config.training.offload_optimizer_during_rollout:
            changes.append("training.offload_optimizer_during_rollout=true")
        changes += _engine_advice(plan, limit)
    if plan.largest.total > limit:
        changes += _training_advice(plan, limit)
    if not plan.engine_fits:
        changes.append(_larger_engine(plan))
    return changes


def _larger_engine(plan: Plan) -> str:
    """Return what makes room for a sequence in an engine that has none."""
    rollout = plan.config.rollout
    for size in (2, 4, 8, 16):
        if size <= rollout.tensor_model_parallel_size:
            continue
        larger = replace(rollout, tensor_model_parallel_size=size)
        try:
            other = make_plan(replace(plan.config, rollout=larger), plan.machine, plan.rates)
        except UserError:  # it does not divide the GPUs, or the model
            continue
        if other.engine_fits:
            return f"rollout.tensor_model_parallel_size={size}, for room for a response"
    return (
        "an engine has no room for a response: a larger rollout.gpu_memory_utilization, a shorter "
        "rollout.max_response_length, or more GPUs for an engine"
    )


def _training_advice(plan: Plan, limit: float) -> list[str]:
    parallel = plan.config.parallel
    largest = plan.largest
    activations = largest.activations
    over = largest.total - limit
    changes = []
    if not parallel.use_distributed_optimizer and plan.data_parallel > 1:
        changes.append("parallel.use_distributed_optimizer=true")
    if activations.layers > over / 4 and parallel.recompute_granularity != "full":
        changes.append("parallel.recompute_granularity=full")
    if plan.layout.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        changes.append("parallel.sequence_parallel=true")
    if activations.total > over / 4:
        key = "micro_batch_size"
        if parallel.sequence_packing:
            key = "max_tokens_per_micro_batch"
        changes.append(f"a smaller training.{key}, or a larger parallel.context_parallel_size")
    if largest.engine:
        changes.append(
            "an engine that does not stay on the GPU while the policy trains (rollout.engine)"
        )
    changes.append("more tensor or pipeline parallelism, or more GPUs")
    return changes


def less_recomputation(plan: Plan) -> tuple[str, Plan] | None:
    """Return the name of the fastest kind of recomputation that fits as well, and the plan with it;
    None if there is none faster than the configured one.
    """
    if not plan.fits:
        return None
    parallel = plan.config.parallel
    kinds: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
    for kind in kinds[: kinds.index(parallel.recompute_granularity)]:
        changed = replace(plan.config, parallel=replace(parallel, recompute_granularity=kind))
        other = make_plan(changed, plan.machine, plan.rates)
        if other.fits:
            return kind, other
    return None


def _engine_advice(plan: Plan, limit: float) -> list[str]:
    engine = plan.engine
    rollout = plan.config.rollout
    room = limit - (plan.rollout_bytes - engine.kv_cache - engine.sampling)
    if engine.kind == "vllm":
        share = (room + engine.weights) / (plan.machine.gpu_memory_gb * GB)
        fitting = math.floor(share * 100) / 100
        if room > 0:
            return [f"rollout.gpu_memory_utilization={fitting:.2f} (or lower)"]
    elif room > 0:
        per_sequence = (engine.kv_cache + engine.sampling) / engine.concurrent
        sequences = int(room // per_sequence) // rollout.group_size * rollout.group_size
        if sequences:
            return [
                f"rollout.max_num_seqs={sequences} (the embedded engine's keys and values), or "
                "the vLLM engine"
            ]
    return [
        "the engine's weights do not fit next to the policy's state: a larger "
        "rollout.tensor_model_parallel_size (vLLM)"
    ]


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, sizes in bytes and times in seconds."""
    layers_of = layers_per_stage(plan.arch.num_layers, plan.layout)
    seconds = asdict(plan.seconds)
    seconds["total"] = plan.seconds.total
    seconds["beside_training"] = plan.seconds.beside
    layout = asdict(plan.layout)
    layout["data_parallel_size"] = plan.data_parallel
    return {
        "model": plan.config.model.path,
        "parameters": number_of_parameters(plan.arch),
        "gpus": plan.machine.gpus,
        "engine_gpus": plan.machine.engine_gpus,
        "layout": layout,
        "context_parallel_size": plan.config.parallel.context_parallel_size,
        "tokens_per_micro_batch": plan.tokens_per_micro_batch,
        "micro_batches_per_update": plan.micro_batches,
        "stages": [
            _stage_dict(stage, layers) for stage, layers in zip(plan.stages, layers_of, strict=True)
        ],
        "largest_stage": plan.largest.stage,
        "engine": asdict(plan.engine),
        "training_bytes": plan.largest.total,
        "rollout_bytes": plan.rollout_bytes,
        "saving_bytes": plan.saving_bytes,
        "host_bytes_per_node": plan.host_bytes,
        "peak_bytes": plan.peak,
        "gpu_memory_bytes": int(plan.machine.gpu_memory_gb * GB),
        "fits": plan.fits,
        "change": advice(plan),
        "bytes_sent_per_step": asdict(plan.traffic),
        "resharding_bytes": plan.resharding,
        "step_seconds": seconds,
        "signal_lead_seconds": lead_of(plan).seconds,
        "assumptions": {
            **asdict(plan.rates),
            "reserve_gb": plan.machine.reserve_gb,
            "response_tokens": plan.work.response_length,
            "prompt_tokens": plan.config.data.max_prompt_length,
            "layers": "transformer_engine" if plan.layout.transformer_engine else "local",
            "engine": plan.engine.kind,
        },
    }


def _stage_dict(stage: Stage, layers: int) -> dict[str, Any]:
    activations = stage.activations
    return {
        "stage": stage.stage,
        "layers": layers,
        **asdict(stage.state),
        "activations": activations.layers,
        "logits": activations.logits,
        "working": activations.working,
        "micro_batches_in_flight": activations.in_flight,
        "reference_policy": stage.reference,
        "engine_resident": stage.engine,
        "total": stage.total,
        "resting": stage.resting,
        "saving": stage.saving,
        "host_copies": stage.host_copies,
        "saved": stage.saved,
    }
