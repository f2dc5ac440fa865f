"""``dcpo plan``: memory of the largest rank, bytes moved, a step-time estimate and a verdict. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megatron_dcpo.config import Config
from megatron_dcpo.config.rules import check_engine_size, check_model_rules
from megatron_dcpo.errors import UserError, check_world_size
from megatron_dcpo.objectives import build_method
from megatron_dcpo.planning.hub import architecture_of
from megatron_dcpo.planning.memory import (
    Activations,
    State,
    expert_replicas,
    stage_activations,
    stage_state,
)
from megatron_dcpo.planning.traffic import (
    BytesSent,
    Rates,
    Seconds,
    Work,
    step_seconds,
    step_traffic,
)
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.pipeline import chunk_layers
from megatron_dcpo.weights.planner import check_layout
from megatron_dcpo.weights.reshard_plan import most_received
from megatron_dcpo.weights.table import kv_bytes_per_token, number_of_parameters

MOST_GPUS = 4096
GB = 1e9


@dataclass(frozen=True)
class Machine:
    """What is not in the configuration. ``gpus``: in all, or processes where the ``processor`` is a
    CPU; ``gpu_memory_gb``: of each. ``reserve_gb``: CUDA context, NCCL buffers, fragmentation, what
    a sleeping engine keeps; ``response_tokens``: mean length of a response (0: the longest
    allowed); ``engine_gpus``: those of ``rollout.engine=server``, beside ``gpus`` (0: not planned).
    """

    gpus: int
    gpu_memory_gb: float = 80.0
    reserve_gb: float = 5.0
    response_tokens: int = 0
    processor: Literal["gpu", "cpu"] = "gpu"
    engine_gpus: int = 0


@dataclass(frozen=True)
class EngineMemory:
    """Rollout engine of one rank, bytes: ``kind`` ``transformers``, ``vllm`` or ``server`` (on
    other devices).
    """

    kind: str
    tensor_model_parallel_size: int
    weights: int
    kv_cache: int
    kv_per_token: int
    sampling: int
    concurrent: int
    responses: int
    resident: int


@dataclass(frozen=True)
class Stage:
    """A pipeline stage's rank, bytes. On the device: in the training phase ``state``, the larger of
    ``activations`` and the ``reference`` policy's forward pass, and what the ``engine`` keeps;
    ``resting`` in a rollout. On the host: ``host_copies`` (the probe's gradients, the reference
    policy, what is offloaded) and ``saved``, the copy that a checkpoint is written from.
    """

    stage: int
    state: State
    activations: Activations
    reference: int
    engine: int
    resting: int
    host_copies: int
    saved: int

    @property
    def total(self) -> int:
        return self.state.total + self.engine + self.activations.total + self.reference

    @property
    def saving(self) -> int:
        """Return the bytes while a checkpoint is begun: the engine sleeps, nothing is gathered."""
        return self.state.total + self.engine


@dataclass(frozen=True)
class Plan:
    """The whole plan of a run. ``stages`` in pipeline order; ``peak``: bytes of the largest rank in
    its worse phase, reserve included.
    """

    arch: Architecture
    layout: Layout
    config: Config
    machine: Machine
    rates: Rates
    data_parallel: int
    tokens_per_micro_batch: int
    micro_batches: int
    work: Work
    engine: EngineMemory
    stages: tuple[Stage, ...]
    traffic: BytesSent
    resharding: int
    seconds: Seconds

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def rollout_bytes(self) -> int:
        resting = max(stage.resting for stage in self.stages)
        if self.engine.kind == "server":
            return resting
        return resting + self.engine.weights + self.engine.kv_cache + self.engine.sampling

    @property
    def saving_bytes(self) -> int:
        return max(stage.saving for stage in self.stages)

    @property
    def on_cpu(self) -> bool:
        """Return whether device and host are one memory."""
        return self.machine.processor == "cpu"

    @property
    def host_copies(self) -> int:
        return max(stage.host_copies for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Return the bytes on the busiest node, of which a checkpoint's copy is part."""
        ranks = min(self.machine.gpus, self.rates.gpus_per_node)
        return ranks * max(stage.host_copies + stage.saved for stage in self.stages)

    @property
    def peak(self) -> int:
        copies = self.host_copies
        phases = max(self.largest.total, self.rollout_bytes, self.saving_bytes) + (
            copies if self.on_cpu else 0
        )
        return int(phases + self.machine.reserve_gb * GB)

    @property
    def fits(self) -> bool:
        return self.peak <= self.machine.gpu_memory_gb * GB


def make_plan(config: Config, machine: Machine, rates: Rates | None = None) -> Plan:
    """Plan ``config`` on ``machine``. Raises :class:`UserError` when the layout does not divide the
    model or the GPUs.
    """
    rates = rates or Rates()
    arch = architecture_of(config.model.path)
    _check_positions(arch, config)
    # on GPUs ``auto`` means Transformer Engine, whatever this machine has
    layout = Layout.of(
        config.parallel, machine.processor == "gpu" and config.model.transformer_impl != "local"
    )
    check_layout(arch, layout)
    check_model_rules(config, arch, chunk_layers(arch.num_layers, layout))
    context = config.parallel.context_parallel_size
    replicas = _check_gpus(layout, context, machine.gpus)
    data_parallel = replicas // context
    work, tokens, scored, per_update = _work(config, layout, machine, data_parallel)
    engine = _engine(arch, config, machine)
    method = build_method(config.objective)
    reference = any(method.options.blocks("kl_coef"))
    several = config.training.updates_per_rollout > 1 and method.options.old_logprobs == "trainer"
    needs_old = several or method.needs_old_logprobs
    work = replace(work, forward_passes=int(needs_old) + int(reference))
    batch = tokens // context, math.ceil(scored / context), per_update
    stages = tuple(
        _stage(arch, layout, config, stage, replicas, batch, engine, reference)
        for stage in range(layout.pipeline_model_parallel_size)
    )
    largest = max(stages, key=lambda stage: stage.state.buffer_numel)
    traffic = step_traffic(arch, layout, config, replicas, largest.state, work)
    resharding = _resharding(arch, layout, config, engine, replicas)
    decoding = (
        engine.weights,
        engine.kv_per_token,
        engine.concurrent,
        engine.responses,
        machine.engine_gpus,
    )
    seconds = step_seconds(
        arch, layout, config, machine.gpus, work, traffic, resharding, *decoding, rates
    )
    return Plan(
        arch=arch,
        layout=layout,
        config=config,
        machine=machine,
        rates=rates,
        data_parallel=data_parallel,
        tokens_per_micro_batch=tokens,
        micro_batches=per_update,
        work=work,
        engine=engine,
        stages=stages,
        traffic=traffic,
        resharding=resharding,
        seconds=seconds,
    )


def _check_positions(arch: Architecture, config: Config) -> None:
    prompt, response = config.data.max_prompt_length, config.rollout.max_response_length
    if prompt + response > arch.max_position_embeddings:
        raise UserError(
            f"data.max_prompt_length={prompt} and rollout.max_response_length={response} are more "
            f"than {config.model.path} "
            f"has positions (max_position_embeddings={arch.max_position_embeddings}); lower one "
            "of them"
        )


def _check_gpus(layout: Layout, context_parallel_size: int, gpus: int) -> int:
    """Return how many ranks hold the same part of the model: data- times context-parallel size."""
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus {gpus} is outside 1 ... {MOST_GPUS}")
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    check_world_size(
        tp,
        pp,
        context_parallel_size,
        gpus,
        layout.expert_model_parallel_size * layout.expert_tensor,
    )
    return gpus // (tp * pp)


def _work(
    config: Config, layout: Layout, machine: Machine, data_parallel: int
) -> tuple[Work, int, int, int]:
    """Return a step's work; tokens of the largest micro-batch, those of them that are scored,
    micro-batches of an update.
    """
    training, parallel = config.training, config.parallel
    prompt, longest = config.data.max_prompt_length, config.rollout.max_response_length
    mean = machine.response_tokens or longest
    if not 0 < mean <= longest:
        raise UserError(
            f"--response-tokens {mean} is outside 1 ... rollout.max_response_length={longest}"
        )
    responses = config.data.prompts_per_step * config.rollout.group_size
    per_rank = -(-responses // training.updates_per_rollout // data_parallel) or 1
    sequence = prompt + longest
    if parallel.sequence_packing:
        tokens = min(max(training.max_tokens_per_micro_batch, sequence), per_rank * sequence)
        together = max(1, training.max_tokens_per_micro_batch // (prompt + mean))
    else:
        together = min(training.micro_batch_size, per_rank)
        tokens = together * sequence
    multiple = layout.tensor_model_parallel_size if parallel.sequence_parallel else 1
    if parallel.context_parallel_size > 1:
        multiple = parallel.context_parallel_size * math.lcm(2, multiple)
    tokens = -(-tokens // multiple) * multiple
    scored = math.ceil(tokens * longest / sequence)
    rounds = (
        layout.pipeline_model_parallel_size
        if layout.virtual_pipeline_model_parallel_size > 1
        else 1
    )
    micro_batches = -(-per_rank // (together * rounds)) * rounds
    work = Work(
        tokens=responses * (prompt + mean),
        length=prompt + mean,
        response_length=mean,
        micro_batches=micro_batches * training.updates_per_rollout,
        forward_passes=0,
        updates=training.updates_per_rollout,
    )
    return work, tokens, scored, micro_batches


def _stage(
    arch: Architecture,
    layout: Layout,
    config: Config,
    stage: int,
    replicas: int,
    batch: tuple[int, int, int],
    engine: EngineMemory,
    reference: bool,
) -> Stage:
    state = stage_state(arch, layout, config, stage, replicas)
    training, weights = config.training, state.numel * dtype_bytes(config.model.params_dtype)
    # The probe keeps one block's gradient, as it enters the norm, through the step's backward pass.
    probe = 4 * state.shard_numel if training.gradient_probe_interval else 0
    offloaded = (
        state.main_params + state.moments if training.offload_optimizer_during_rollout else 0
    )
    resting = state.total - (
        offloaded + state.gradients if training.offload_optimizer_during_rollout else 0
    )
    own = (
        12 * state.shard_numel
        if config.parallel.use_distributed_optimizer
        else (state.main_params + state.moments) // replicas
    )
    reference_copy = (
        weights if reference and not config.frozen else 0
    )  # a frozen policy is its own reference
    return Stage(
        stage=stage,
        state=state,
        activations=stage_activations(arch, layout, config, stage, *batch),
        reference=reference_copy,
        engine=engine.resident,
        resting=resting,
        host_copies=probe + offloaded + reference_copy,
        # an adapter without gradients
        saved=own
        + _of_each(state, weights, replicas, expert_replicas(layout, replicas))
        + state.adapter * 3 // 4,
    )


def _of_each(state: State, weights: int, replicas: int, expert_replicas: int) -> int:
    """Return a rank's share of the weights that others hold as well."""
    experts = weights * state.expert_numel // max(state.buffer_numel, 1)
    return (weights - experts) // replicas + experts // expert_replicas


def _engine(arch: Architecture, config: Config, machine: Machine) -> EngineMemory:
    rollout = config.rollout
    if machine.engine_gpus and rollout.engine != "server":
        raise UserError(f"--engine-gpus is for rollout.engine=server, not {rollout.engine}")
    by_default = "vllm" if machine.processor == "gpu" else "transformers"
    kind: str = by_default if rollout.engine == "auto" else rollout.engine
    size = rollout.tensor_model_parallel_size if kind == "vllm" else 1
    if machine.gpus % size:
        raise UserError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {machine.gpus} GPUs"
        )
    check_engine_size(arch, size)
    itemsize = dtype_bytes(rollout.vllm.get("dtype", config.model.params_dtype))
    weights = number_of_parameters(arch) * itemsize // size
    kv = kv_bytes_per_token(arch, itemsize, size)
    longest = config.data.max_prompt_length + rollout.max_response_length
    group, prompts = rollout.group_size, -(-config.data.prompts_per_step * size // machine.gpus)
    responses = prompts * group
    if kind == "server" and not machine.engine_gpus:
        return EngineMemory(kind, 1, 0, 0, kv, 0, rollout.max_num_seqs, responses, 0)
    if kind == "transformers":
        at_once = min(responses, max(1, rollout.max_num_seqs // group) * group)
        # sample_token: logits, scaled in fp32, log-probs, probabilities and their sums in fp64
        sampling = at_once * arch.vocab_size * (itemsize + 4 + 4 + 8 + 8)
        one_layer = (
            at_once * longest * kv // arch.num_layers
        )  # growing the cache copies a layer at a time
        cache = at_once * longest * kv + one_layer
        return EngineMemory(kind, 1, weights, cache, kv, sampling, at_once, responses, weights)
    share = int(rollout.gpu_memory_utilization * machine.gpu_memory_gb * GB)
    if (
        kind == "server"
    ):  # the fewest GPUs per engine that leave a third of its memory to keys and values
        sizes = [size for size in (1, 2, 4, 8) if machine.engine_gpus % size == 0]
        size = next((size for size in sizes if weights / size < share * 2 / 3), sizes[-1])
        weights, kv = weights // size, kv_bytes_per_token(arch, itemsize, size)
        responses = -(-config.data.prompts_per_step * size // machine.engine_gpus) * group
    cache = rollout.vllm.get("kv_cache_memory_bytes") or max(0, share - weights)
    mean = config.data.max_prompt_length + (machine.response_tokens or rollout.max_response_length)
    concurrent = min(rollout.max_num_seqs, responses, cache // (kv * mean))
    return EngineMemory(
        kind,
        size,
        weights,
        cache,
        kv,
        0,
        concurrent,
        responses,
        0 if kind == "server" or rollout.vllm.get("enable_sleep_mode", True) else weights + cache,
    )


def _resharding(
    arch: Architecture, layout: Layout, config: Config, engine: EngineMemory, replicas: int
) -> int:
    """Return the bytes that the rank receiving most gets in a weight synchronization: its engine's
    part less what it holds of it, or from a server's broadcast all of the model.
    """
    itemsize = dtype_bytes(config.model.params_dtype)
    if engine.kind == "server":
        return number_of_parameters(arch) * itemsize if engine.weights else 0
    replicas = replicas * layout.tensor_model_parallel_size // layout.width
    return most_received(arch, layout, engine.tensor_model_parallel_size, replicas, itemsize)
