"""A plan, printed as tables; and, for ``dcpo plan --reshard``, the plan of a weight
synchronization, computed without a process group or a weight.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_dcpo.config import Config
from megatron_dcpo.config.rules import check_model_rules
from megatron_dcpo.config.sections import REQUEST_SECONDS
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.machine import GB
from megatron_dcpo.planning.plan import Plan, architecture_of
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.runtime.text import counted
from megatron_dcpo.weights.adapter_shape import adapter_shape
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.packed import broadcasts
from megatron_dcpo.weights.pipeline import chunk_layers, layers_per_stage
from megatron_dcpo.weights.planner import check_layout
from megatron_dcpo.weights.reshard_plan import EngineRanks, reshard_plan
from megatron_dcpo.weights.table import number_of_parameters


def print_plan(plan: Plan) -> None:
    """Print memory, traffic, time and verdict. GB are 1e9 bytes."""
    console = Console(width=118, highlight=False)
    console.print(_model_line(plan))
    console.print(_batch_line(plan))
    console.print(_memory(plan))
    if plan.machine.engine_gpus:
        console.print(_server_line(plan))
    if not plan.on_cpu:
        console.print(_host(plan))
    console.print(_traffic(plan))
    console.print(_assumptions(plan))
    if plan.rehearsed:
        console.print(
            "Rehearsed: the totals of training and save, and the bytes that a rank sends; the rest "
            "by formulas."
        )
    if not plan.on_cpu:
        console.print(f"Slurm: --signal=B:USR1@{plan.signal_lead} at least")
    if plan.machine.engine_gpus and plan.seconds.rollout > REQUEST_SECONDS:
        console.print(
            f"A response waits in the servers' queue for up to {plan.seconds.rollout:.0f} s, and "
            f"may take {REQUEST_SECONDS:.0f} s: more --engine-gpus, a smaller "
            "data.prompts_per_step, or a shorter rollout.max_response_length"
        )
    limit = f"{plan.machine.gpu_memory_gb:.4g} GB"
    verdict = "fits" if plan.fits else "does not fit"
    others = "--fastest: other layouts"
    if not plan.rehearsed and not plan.on_cpu:
        others += "; --rehearse: the job's own code counts instead of formulas"
    console.print(f"{verdict}: {_gb(plan.peak)} GB of {limit}; {others}")


def _model_line(plan: Plan) -> str:
    layout = plan.layout
    parallel = plan.config.parallel
    devices = "GPUs"
    if plan.on_cpu:
        devices = "process(es) of this CPU"
    parts = [
        f"{plan.arch.name}, {counted(number_of_parameters(plan.arch))} parameters, on "
        f"{plan.machine.gpus} {devices}: TP {layout.tensor_model_parallel_size} x PP "
        f"{layout.pipeline_model_parallel_size} x DP {plan.data_parallel}"
    ]
    if parallel.context_parallel_size > 1:
        parts[0] += f" x CP {parallel.context_parallel_size}"
    if layout.expert_model_parallel_size > 1:
        parts.append(f"EP {layout.expert_model_parallel_size} x ETP {layout.expert_tensor}")
    if layout.virtual_pipeline_model_parallel_size > 1:
        parts.append(f"VPP {layout.virtual_pipeline_model_parallel_size}")
    layers = layers_per_stage(plan.arch.num_layers, layout)
    if len(layers) > 1:
        parts.append(f"{'-'.join(map(str, layers))} layers")
    if parallel.sequence_parallel:
        parts.append("sequence parallel")
    if parallel.use_distributed_optimizer:
        parts.append("distributed optimizer")
    parts.append(f"recomputation {parallel.recompute_granularity}")
    return ", ".join(parts)


def _batch_line(plan: Plan) -> str:
    parallel = plan.config.parallel
    packed = "packed" if parallel.sequence_packing else "padded"
    line = (
        f"{plan.work.updates} update(s) of {plan.micro_batches} micro-batches per rank, {packed}, "
        f"{plan.tokens_per_micro_batch:,} tokens at most each"
    )
    if parallel.context_parallel_size > 1:
        line += f", {parallel.context_parallel_size} ranks share them"
    return line


def _server_line(plan: Plan) -> str:
    engine = plan.engine
    size = engine.tensor_model_parallel_size
    return (
        f"The server's engines, on {plan.machine.engine_gpus} separate GPUs: DP "
        f"{plan.machine.engine_gpus // size} x TP {size}, each GPU {_gb(engine.weights)} GB of "
        f"weights and {_gb(engine.kv_cache)} GB of keys and values, {engine.concurrent} sequences "
        "at once"
    )


@dataclass(frozen=True)
class _MemoryRow:
    """One row of the table of memory: bytes in training, while saving, in a rollout."""

    name: str
    training: int = 0
    saving: int = 0
    rollout: int = 0


def _memory(plan: Plan) -> Table:
    table = Table(
        title=f"memory of a rank of the largest pipeline stage ({plan.largest.stage}), GB",
        title_justify="left",
    )
    table.add_column("", justify="left")
    for column in ("training", "save", "rollout"):
        table.add_column(column, justify="right")
    for row in [*_state_rows(plan), *_activation_rows(plan), *_other_rows(plan)]:
        if row.training or row.saving or row.rollout:
            table.add_row(row.name, _gb(row.training), _gb(row.saving), _gb(row.rollout))
    table.add_section()
    always = _always(plan)
    table.add_row(
        "total, rehearsed" if plan.rehearsed else "total",
        _gb(plan.training_bytes + always),
        _gb(plan.saving_bytes + always),
        _gb(plan.rollout_bytes + always),
    )
    return table


def _always(plan: Plan) -> int:
    """Return the bytes that are taken in every phase."""
    always = int(plan.machine.reserve_gb * GB)
    if plan.on_cpu:
        always += plan.host_copies
    return always


def _state_rows(plan: Plan) -> list[_MemoryRow]:
    state = plan.largest.state
    resting = max(plan.stages, key=lambda stage: stage.resting).state
    offloaded = plan.config.training.offload_optimizer_during_rollout
    return [
        _MemoryRow(
            name=f"weights ({plan.config.model.params_dtype})",
            training=state.weights,
            saving=state.weights,
            rollout=resting.weights,
        ),
        _MemoryRow(
            name="gradients (fp32)",
            training=state.gradients,
            saving=state.gradients,
            rollout=0 if offloaded else resting.gradients,
        ),
        _MemoryRow(
            name="optimizer: fp32 main parameters",
            training=state.main_params,
            saving=state.main_params,
            rollout=0 if offloaded else resting.main_params,
        ),
        _MemoryRow(
            name="optimizer: moments (fp32)",
            training=state.moments,
            saving=state.moments,
            rollout=0 if offloaded else resting.moments,
        ),
        _MemoryRow(
            name="adapter, its gradients and moments (fp32)",
            training=state.adapter,
            saving=state.adapter,
            rollout=resting.adapter,
        ),
    ]


def _activation_rows(plan: Plan) -> list[_MemoryRow]:
    stage = plan.largest
    activations = stage.activations
    rows = [
        _MemoryRow(
            name="reference policy or teacher, for its pass",
            training=max(stage.reference, stage.teacher),
        ),
        _MemoryRow(
            name=f"activations of {activations.in_flight:g} micro-batch(es)",
            training=activations.layers,
        ),
    ]
    if activations.logits >= activations.working:
        rows.append(_MemoryRow(name="output layer, a chunk of logits", training=activations.logits))
    else:
        rows.append(
            _MemoryRow(name="largest backward transient of a layer", training=activations.working)
        )
    return rows


def _other_rows(plan: Plan) -> list[_MemoryRow]:
    engine = plan.engine
    shares_device = engine.kind != "server"
    resident = plan.largest.engine
    copies = plan.host_copies if plan.on_cpu else 0
    reserve = int(plan.machine.reserve_gb * GB)
    return [
        _MemoryRow(
            name=f"engine weights ({engine.kind}, TP {engine.tensor_model_parallel_size})",
            rollout=engine.weights if shares_device else 0,
        ),
        _MemoryRow(name="engine, kept while training", training=resident, saving=resident),
        _MemoryRow(
            name=f"KV cache ({engine.concurrent} sequences at once)",
            rollout=engine.kv_cache if shares_device else 0,
        ),
        _MemoryRow(name="sampling", rollout=engine.sampling),
        _MemoryRow(
            name="reference policy, teacher",
            training=copies,
            saving=copies,
            rollout=copies,
        ),
        _MemoryRow(
            name="libraries" if plan.on_cpu else "reserve",
            training=reserve,
            saving=reserve,
            rollout=reserve,
        ),
    ]


def _host(plan: Plan) -> str:
    largest = max(plan.stages, key=lambda stage: stage.host_copies + stage.saved)
    return (
        f"On the host, per rank: {largest.host_copies / GB:.1f} GB that leave the device for a "
        f"time, and {largest.saved / GB:.1f} GB from which a checkpoint is written "
        f"({plan.host_bytes / GB:.0f} GB per node)"
    )


def _traffic(plan: Plan) -> Table:
    table = Table(title="one step", title_justify="left")
    table.add_column("", justify="left")
    table.add_column("GB sent by a rank", justify="right")
    table.add_column("seconds", justify="right")
    seconds = plan.seconds
    traffic = plan.traffic
    gradients = "all-reduce"
    if plan.config.parallel.use_distributed_optimizer:
        gradients = "reduce-scatter, all-gather"
    activations = "all-reduce"
    if plan.config.parallel.sequence_parallel:
        activations = "gather, scatter"
    log_probs = f"log-probs of old and reference policy ({plan.work.forward_passes} pass(es))"
    experts = "expert parallel (tokens to experts and back)"
    rows = [
        ("rollout", 0, seconds.rollout),
        (log_probs, 0, seconds.forward),
        ("log-probs of the teacher (its pass alone, without communication)", 0, seconds.teacher),
        ("update: forward and backward", 0, seconds.update),
        (f"tensor parallel ({activations})", traffic.tensor_parallel, seconds.tensor_parallel),
        ("context parallel (keys and values)", traffic.context_parallel, seconds.context_parallel),
        (experts, traffic.expert_parallel, seconds.expert_parallel),
        (f"data parallel ({gradients})", traffic.data_parallel, seconds.data_parallel),
        ("pipeline (point to point)", traffic.pipeline, seconds.pipeline),
        ("weights into the engine", plan.resharding, seconds.resharding),
        ("changing between training and generation", 0, seconds.changeover),
    ]
    for name, nbytes, value in rows:
        if nbytes or value:
            table.add_row(name, _gb(nbytes), f"{value:.2f}")
    table.add_section()
    table.add_row("total, nothing overlapped", "", f"{seconds.total:.1f}")
    if plan.config.generates_ahead:
        name = "total, generation alongside training (rollout.max_staleness)"
        table.add_row(name, "", f"{seconds.beside:.1f}")
    least, most = plan.step_range
    table.add_row("range of the estimate", "", f"{least:.0f} to {most:.0f}")
    return table


def _assumptions(plan: Plan) -> str:
    rates = plan.rates
    layers = "the local spec"
    if plan.layout.transformer_engine:
        layers = "Transformer Engine"
    if plan.on_cpu:
        speed = (
            f"Measured here, a process: {rates.peak_tflops * 1000:.0f} GFLOP/s, "
            f"{rates.hbm_gbps:.0f} GB/s of memory"
        )
    else:
        speed = (
            f"Assumed: {rates.peak_tflops:g} TFLOP/s at {rates.mfu:.0%} (experts "
            f"{rates.expert_mfu:.1%}), {rates.hbm_gbps:g} GB/s of memory, {rates.nvlink_gbps:g} "
            f"GB/s in a node of {rates.gpus_per_node}, {rates.link_gbps:g} GB/s between nodes"
        )
    config = plan.config
    groups = ""
    if config.most_groups > config.data.prompts_per_step:
        groups = (
            f" A step trains on {config.data.prompts_per_step} groups with a signal in the "
            f"reasoning, and on at most {config.most_groups} in all (rollout.filter_groups, "
            "rollout.max_refills): the plan is for the most."
        )
    return (
        f"{speed}; prompts of {config.data.max_prompt_length} and responses of "
        f"{plan.work.response_length} tokens; layers of {layers}; judging takes no time.{groups}"
    )


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:.2f}" if nbytes else ""


def reshard_facts(config: Config, gpus: int | None = None) -> dict[str, Any]:
    """Return the plan of one synchronization as plain data, sizes in bytes. Raises
    :class:`UserError` for a layout that does not fit.
    """
    arch = architecture_of(config.model.path)
    layout = Layout.of(config.parallel)
    check_layout(arch, layout)
    check_model_rules(config, arch, chunk_layers(arch.num_layers, layout))
    model_parallel = layout.width * layout.pipeline_model_parallel_size
    engine_tp = config.rollout.ranks_of_an_engine
    if gpus is None:
        gpus = max(model_parallel, engine_tp)
    for what, size in (
        ("training TP (or EP x ETP) x PP", model_parallel),
        ("rollout.tensor_model_parallel_size", engine_tp),
    ):
        if gpus < 1 or gpus % size:
            raise UserError(f"--gpus {gpus} is not a multiple of {what} = {size}")
    replicas = gpus // model_parallel
    merged: tuple[str, ...] = ()
    if config.model.adapter:
        merged = adapter_shape(config.model.adapter, arch).tensors
    plan = reshard_plan(
        arch=arch,
        layout=layout,
        engines=EngineRanks(tensor_model_parallel_size=engine_tp, replicas=replicas),
        bucket_bytes=config.rollout.bucket_bytes,
        itemsize=dtype_bytes(config.model.params_dtype),
        merged=merged,
    )
    to_each_server = None
    if config.rollout.weight_transfer == "nccl":
        to_each_server = asdict(broadcasts(arch, plan.itemsize))
    ranks = []
    for rank, received in enumerate(plan.received):
        ranks.append(
            {
                "rank": rank,
                "received": received,
                "least": plan.least[rank],
                "least_whole_tensors": plan.least_whole[rank],
            }
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
        "to_each_server": to_each_server,
        "ranks": ranks,
    }


def reshard_lines(facts: dict[str, Any]) -> list[str]:
    """Return the table of :func:`reshard_facts`."""
    layout = facts["training_layout"]
    lines = [
        f"training TP {layout['tensor_model_parallel_size']} x PP "
        f"{layout['pipeline_model_parallel_size']}, {facts['replicas']} replica(s) -> engines of "
        f"TP {facts['engine_tensor_model_parallel_size']}",
        f"{facts['buckets']} buckets of at most {_size(facts['bucket_bytes'])}, "
        f"{facts['messages']} messages, peak extra memory {_size(facts['peak_bytes'])}, plan "
        f"{facts['checksum']}",
    ]
    sent = facts["to_each_server"]
    if sent:
        lines.append(
            f"to each server: {_size(sent['nbytes'])} in {sent['messages']} broadcasts, the "
            f"largest of {_size(sent['largest'])}, told in {sent['calls']} requests"
        )
    lines.append(f"{'rank of replica':>15} {'received':>12} {'least':>12} {'if whole tensors':>17}")
    for row in facts["ranks"]:
        received = _size(row["received"])
        least = _size(row["least"])
        whole = _size(row["least_whole_tensors"])
        lines.append(f"{row['rank']:>15} {received:>12} {least:>12} {whole:>17}")
    return lines


def _size(nbytes: int) -> str:
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes} B"
