"""A plan, printed as tables.

``dcpo plan --reshard``: what a weight synchronization moves, computed without a process group or a
weight.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dcpo.config.rules import check_model_rules
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.advice import advice, less_recomputation
from megatron_dcpo.planning.hub import architecture_of
from megatron_dcpo.planning.plan import GB, Plan
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.runtime.text import counted
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.pipeline import chunk_layers, layers_per_stage
from megatron_dcpo.weights.planner import check_layout
from megatron_dcpo.weights.reshard_plan import reshard_plan
from megatron_dcpo.weights.table import adapted, number_of_parameters


def print_plan(plan: Plan) -> None:
    """Print memory, traffic, time and verdict. GB are 1e9 bytes."""
    console = Console(width=118, highlight=False)
    layout, config = plan.layout, plan.config
    layers = layers_per_stage(plan.arch.num_layers, layout)
    parameters = number_of_parameters(plan.arch)
    console.print(
        f"{plan.arch.name}, {counted(parameters)} parameters, on {plan.machine.gpus} "
        f"{'process(es) of this CPU' if plan.on_cpu else 'GPUs'}: "
        f"TP {layout.tensor_model_parallel_size} x PP {layout.pipeline_model_parallel_size} x DP "
        f"{plan.data_parallel}"
        + (f" x CP {cp}" if (cp := config.parallel.context_parallel_size) > 1 else "")
        + (
            f", EP {ep} x ETP {layout.expert_tensor}"
            if (ep := layout.expert_model_parallel_size) > 1
            else ""
        )
        + (f", VPP {v}" if (v := layout.virtual_pipeline_model_parallel_size) > 1 else "")
        + (f", {'-'.join(map(str, layers))} layers" if len(layers) > 1 else "")
        + (", sequence parallel" if config.parallel.sequence_parallel else "")
        + (", distributed optimizer" if config.parallel.use_distributed_optimizer else "")
        + f", recomputation {config.parallel.recompute_granularity}"
    )
    packed = "packed" if config.parallel.sequence_packing else "padded"
    console.print(
        f"{plan.work.updates} update(s) of {plan.micro_batches} micro-batches per rank, {packed}, "
        f"{plan.tokens_per_micro_batch:,} tokens at most each"
        + (f", {cp} ranks share them" if cp > 1 else "")
    )
    console.print(_memory(plan))
    if engines := plan.machine.engine_gpus:
        size, engine = plan.engine.tensor_model_parallel_size, plan.engine
        console.print(
            f"The server's engines, on {engines} GPUs of their own: DP {engines // size} x TP "
            f"{size}, each GPU "
            f"{_gb(engine.weights)} GB of weights and {_gb(engine.kv_cache)} GB of keys and "
            "values, "
            f"{engine.concurrent} sequences at once"
        )
    if not plan.on_cpu:
        console.print(_host(plan))
    console.print(_traffic(plan))
    console.print(_assumptions(plan))
    limit = f"{plan.machine.gpu_memory_gb:.4g} GB"
    if plan.fits:
        console.print(f"fits: {_gb(plan.peak)} GB of {limit}")
        if faster := less_recomputation(plan):
            name, other = faster
            console.print(
                f"parallel.recompute_granularity={name} would fit as well: training "
                f"{_gb(other.largest.total)} GB, "
                f"update {other.seconds.update:.0f} s instead of {plan.seconds.update:.0f} s"
            )
    else:
        console.print(
            f"does not fit: {_gb(plan.peak)} GB of {limit}. What to change: "
            + "; ".join(advice(plan))
        )


def _memory(plan: Plan) -> Table:
    stage, engine, config, here = (
        plan.largest,
        plan.engine,
        plan.config,
        plan.engine.kind != "server",
    )
    state, acts = stage.state, stage.activations
    resting = max(plan.stages, key=lambda one: one.resting)
    table = Table(
        title=f"memory of a rank of the largest pipeline stage ({stage.stage}), GB",
        title_justify="left",
    )
    for column in ("", "training", "save", "rollout"):
        table.add_column(column, justify="right" if column else "left")
    reserve, copies = int(plan.machine.reserve_gb * GB), plan.host_copies if plan.on_cpu else 0
    stays, rest = not config.training.offload_optimizer_during_rollout, resting.state
    for name, training, saving, rollout in (
        (f"weights ({config.model.params_dtype})", state.weights, state.weights, rest.weights),
        ("gradients (fp32)", state.gradients, state.gradients, rest.gradients * stays),
        (
            "optimizer: fp32 main parameters",
            state.main_params,
            state.main_params,
            rest.main_params * stays,
        ),
        ("optimizer: moments (fp32)", state.moments, state.moments, rest.moments * stays),
        ("adapter, its gradients and moments (fp32)", state.adapter, state.adapter, rest.adapter),
        ("reference policy, for its pass", stage.reference, 0, 0),
        (f"activations of {acts.in_flight:g} micro-batch(es)", acts.layers, 0, 0),
        *(
            [("output layer, a chunk of logits", acts.logits, 0, 0)]
            if acts.logits >= acts.working
            else [("largest backward transient of a layer", acts.working, 0, 0)]
        ),
        (
            f"engine weights ({engine.kind}, TP {engine.tensor_model_parallel_size})",
            0,
            0,
            engine.weights * here,
        ),
        ("engine, kept while training", stage.engine, stage.engine, 0),
        (f"KV cache ({engine.concurrent} sequences at once)", 0, 0, engine.kv_cache * here),
        ("sampling", 0, 0, engine.sampling),
        ("gradients of the probe, reference policy", copies, copies, copies),
        ("libraries" if plan.on_cpu else "reserve", reserve, reserve, reserve),
    ):
        if training or saving or rollout:
            table.add_row(name, _gb(training), _gb(saving), _gb(rollout))
    table.add_section()
    totals = (stage.total, plan.saving_bytes, plan.rollout_bytes)
    table.add_row("total", *(_gb(total + copies + reserve) for total in totals))
    return table


def _host(plan: Plan) -> str:
    largest = max(plan.stages, key=lambda stage: stage.host_copies + stage.saved)
    return (
        f"On the host, per rank: {largest.host_copies / GB:.1f} GB of what leaves the device for "
        "a time, and "
        f"{largest.saved / GB:.1f} GB that a checkpoint is written from "
        f"({plan.host_bytes / GB:.0f} GB per node)"
    )


def _traffic(plan: Plan) -> Table:
    table = Table(title="one step", title_justify="left")
    for column in ("", "GB sent by a rank", "seconds"):
        table.add_column(column, justify="left" if not column else "right")
    seconds, traffic = plan.seconds, plan.traffic
    gradients = (
        "reduce-scatter, all-gather"
        if plan.config.parallel.use_distributed_optimizer
        else "all-reduce"
    )
    activations = "gather, scatter" if plan.config.parallel.sequence_parallel else "all-reduce"
    for name, nbytes, value in (
        ("rollout", 0, seconds.rollout),
        (
            f"log-probs of old and reference policy ({plan.work.forward_passes} pass(es))",
            0,
            seconds.forward,
        ),
        ("update: forward and backward", 0, seconds.update),
        (f"tensor parallel ({activations})", traffic.tensor_parallel, seconds.tensor_parallel),
        ("context parallel (keys and values)", traffic.context_parallel, seconds.context_parallel),
        (
            "expert parallel (tokens to experts and back)",
            traffic.expert_parallel,
            seconds.expert_parallel,
        ),
        (f"data parallel ({gradients})", traffic.data_parallel, seconds.data_parallel),
        ("pipeline (point to point)", traffic.pipeline, seconds.pipeline),
        ("weights into the engine (received)", plan.resharding, seconds.resharding),
    ):
        if nbytes or value:
            table.add_row(name, _gb(nbytes) if nbytes else "", f"{value:.2f}")
    table.add_section()
    table.add_row("total, nothing overlapped", "", f"{seconds.total:.1f}")
    if plan.config.rollout.async_steps:
        table.add_row(
            "total, generation beside training (rollout.async_steps)", "", f"{seconds.beside:.1f}"
        )
    return table


def _assumptions(plan: Plan) -> str:
    rates = plan.rates
    layers = "Transformer Engine" if plan.layout.transformer_engine else "the local spec"
    speed = (
        f"Measured here, a process: {rates.peak_tflops * 1000:.0f} GFLOP/s, {rates.hbm_gbps:.0f} "
        "GB/s of memory; "
        if plan.on_cpu
        else f"Assumed: {rates.peak_tflops:g} TFLOP/s at {rates.mfu:.0%}, {rates.hbm_gbps:g} GB/s "
        "of memory, "
        f"{rates.nvlink_gbps:g} GB/s in a node of {rates.gpus_per_node}, {rates.link_gbps:g} GB/s "
        "between nodes; "
    )
    return (
        f"{speed}"
        f"prompts of {plan.config.data.max_prompt_length} and responses of "
        f"{plan.work.response_length} tokens; "
        f"layers of {layers}; judging takes no time."
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.2f}" if nbytes else ""


def reshard_facts(config: Any, gpus: int | None = None) -> dict[str, Any]:
    """Return the plan of one synchronization as plain data; bytes. Raises :class:`UserError` on a
    layout that does not fit.
    """
    arch, layout = architecture_of(config.model.path), Layout.of(config.parallel)
    check_layout(arch, layout)
    check_model_rules(config, arch, chunk_layers(arch.num_layers, layout))
    model_parallel = layout.width * layout.pipeline_model_parallel_size
    engine_tp = config.rollout.tensor_model_parallel_size
    gpus = gpus if gpus is not None else max(model_parallel, engine_tp)
    for what, size in (
        ("training TP (or EP x ETP) x PP", model_parallel),
        ("rollout.tensor_model_parallel_size", engine_tp),
    ):
        if gpus < 1 or gpus % size:
            raise UserError(f"--gpus {gpus} is not a multiple of {what} = {size}")
    itemsize = dtype_bytes(config.model.params_dtype)
    replicas = gpus // model_parallel
    merged = adapted(arch, config.model.adapter.targets) if config.model.adapter else ()
    plan = reshard_plan(
        arch, layout, engine_tp, replicas, config.rollout.bucket_bytes, itemsize, merged=merged
    )
    return {
        "model": config.model.path,
        "training_layout": asdict(layout),
        "engine_tensor_model_parallel_size": engine_tp,
        "replicas": replicas,
        "buckets": len(plan.buckets),
        "messages": sum(len(bucket.messages) for bucket in plan.buckets),
        "bucket_bytes": plan.bucket_bytes,
        "peak_bytes": plan.peak_bytes,
        "checksum": plan.checksum,
        "ranks": [
            {
                "rank": rank,
                "received": received,
                "least": plan.least[rank],
                "least_whole_tensors": plan.least_whole[rank],
            }
            for rank, received in enumerate(plan.received)
        ],
    }


def reshard_lines(facts: dict[str, Any]) -> list[str]:
    layout = facts["training_layout"]
    lines = [
        f"training TP {layout['tensor_model_parallel_size']} x PP "
        f"{layout['pipeline_model_parallel_size']}, "
        f"{facts['replicas']} replica(s) -> engines of TP "
        f"{facts['engine_tensor_model_parallel_size']}",
        f"{facts['buckets']} buckets of at most {_size(facts['bucket_bytes'])}, "
        f"{facts['messages']} messages, "
        f"peak extra memory {_size(facts['peak_bytes'])}, plan {facts['checksum']}",
    ]
    lines.append(f"{'rank of replica':>15} {'received':>12} {'least':>12} {'if whole tensors':>17}")
    for row in facts["ranks"]:
        sizes = (_size(row[key]) for key in ("received", "least", "least_whole_tensors"))
        lines.append("{:>15} {:>12} {:>12} {:>17}".format(row["rank"], *sizes))
    return lines


def _size(nbytes: int) -> str:
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes} B"
