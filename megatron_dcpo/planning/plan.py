"""``dcpo plan``: memory of the largest rank, bytes moved, an estimate of the step time, a verdict.
A pure function of configuration and machine.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_dcpo.architectures.config_json import Architecture, read_architecture
from megatron_dcpo.config import Config
from megatron_dcpo.config.rules import check_model_rules
from megatron_dcpo.errors import UserError, check_world_size, one_line
from megatron_dcpo.objectives import build_method
from megatron_dcpo.planning.decoding import rollout_steps
from megatron_dcpo.planning.engine_memory import EngineMemory, engine_memory
from megatron_dcpo.planning.machine import GB, Machine, Rates
from megatron_dcpo.planning.memory import (
    Activations,
    State,
    expert_replicas,
    stage_activations,
    stage_state,
)
from megatron_dcpo.planning.step_time import Seconds, StepLoad, pass_seconds, step_seconds
from megatron_dcpo.planning.traffic import BytesSent, Work, step_traffic
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.packed import broadcasts
from megatron_dcpo.weights.pipeline import chunk_layers, layers_per_stage
from megatron_dcpo.weights.planner import check_layout
from megatron_dcpo.weights.reshard_plan import most_received
from megatron_dcpo.weights.table import number_of_parameters

logger = logging.getLogger(__name__)

MOST_GPUS = 4096
# public config.json files of models that need not be on this machine
MODELS = Path(__file__).with_name("models")
# What a node writes of a checkpoint in a second to the disk of all nodes: assumed, not measured.
DISK_GBPS = 1.0
# until all ranks know of a signal, and for the processes to end
_MARGIN_SECONDS = 60
UNCERTAIN = 0.25  # of an estimated step


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of an update on one data-parallel rank: the ``tokens`` of the largest, how
    many of these are ``scored``, and their ``count``.
    """

    tokens: int
    scored: int
    count: int


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage, in bytes.

    On the device there are, in training, ``state``, the larger of ``activations`` and the
    ``reference`` policy's forward pass, the ``teacher`` for its pass, and the part of the
    ``engine`` that stays; in a rollout there is ``resting``. On the host there are ``host_copies``
    (the reference policy, the teacher, offloaded state) and ``saved``, the copy from which a
    checkpoint is written.
    """

    stage: int
    state: State
    activations: Activations
    reference: int
    teacher: int
    engine: int
    resting: int
    host_copies: int
    saved: int

    @property
    def total(self) -> int:
        frozen = max(self.reference, self.teacher)  # one after the other
        return self.state.total + self.engine + self.activations.total + frozen

    @property
    def saving(self) -> int:
        """Return the bytes while a checkpoint begins: the engine sleeps, nothing is gathered."""
        return self.state.total + self.engine


@dataclass(frozen=True)
class RehearsedMemory:
    """The most bytes on the device that a rehearsal counted, on any rank."""

    training: int
    saving: int


@dataclass(frozen=True)
class Plan:
    """The whole plan of a run, with its ``stages`` in pipeline order. ``peak`` is the memory of the
    largest rank in its worst phase, reserve included. What was ``rehearsed`` takes the place of the
    sums over ``stages``.
    """

    arch: Architecture
    layout: Layout
    config: Config
    machine: Machine
    rates: Rates
    data_parallel: int
    tokens_per_micro_batch: int
    micro_batches: int
    stages: tuple[Stage, ...]
    load: StepLoad
    seconds: Seconds
    rehearsed: RehearsedMemory | None = None

    @property
    def work(self) -> Work:
        return self.load.work

    @property
    def engine(self) -> EngineMemory:
        return self.load.engine

    @property
    def traffic(self) -> BytesSent:
        return self.load.traffic

    @property
    def resharding(self) -> int:
        """Return the bytes that the busiest rank receives, or sends to servers, when the engine
        gets new weights.
        """
        return self.load.resharding

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.total)

    @property
    def training_bytes(self) -> int:
        if self.rehearsed:
            return self.rehearsed.training
        return self.largest.total

    @property
    def rollout_bytes(self) -> int:
        resting = max(stage.resting for stage in self.stages)
        if self.engine.kind == "server":
            return resting
        return resting + self.engine.weights + self.engine.kv_cache + self.engine.sampling

    @property
    def saving_bytes(self) -> int:
        if self.rehearsed:
            return self.rehearsed.saving
        return max(stage.saving for stage in self.stages)

    @property
    def step(self) -> float:
        """Return the seconds of a step as the configuration has it."""
        if self.config.generates_ahead:
            return self.seconds.beside
        return self.seconds.total

    @property
    def step_range(self) -> tuple[float, float]:
        """Return the least and the most seconds that a step may take: no published step of a known
        model was farther from what the other settings predict
        (docs/plan.md#against-published-steps), and no step of ours has been measured.
        """
        return self.step * (1 - UNCERTAIN), self.step * (1 + UNCERTAIN)

    @property
    def on_cpu(self) -> bool:
        """Return whether device and host share one memory."""
        return self.machine.processor == "cpu"

    @property
    def host_copies(self) -> int:
        return max(stage.host_copies for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Return the bytes on the busiest node, with a checkpoint's copy."""
        ranks = min(self.machine.gpus, self.rates.gpus_per_node)
        return ranks * max(stage.host_copies + stage.saved for stage in self.stages)

    @property
    def signal_lead(self) -> int:
        """Return the seconds, in whole minutes, that a batch job needs between its warning and its
        end: for the step under way and for a checkpoint to reach the disk. A validation is not in
        it.
        """
        ranks = min(self.machine.gpus, self.rates.gpus_per_node)
        saved = ranks * max(stage.saved for stage in self.stages)
        seconds = self.step + saved / (DISK_GBPS * GB) + _MARGIN_SECONDS
        return math.ceil(seconds / 60) * 60

    @property
    def peak(self) -> int:
        peak = max(self.training_bytes, self.rollout_bytes, self.saving_bytes)
        if self.on_cpu:
            peak += self.host_copies
        return int(peak + self.machine.reserve_gb * GB)

    @property
    def engine_fits(self) -> bool:
        """Return whether an engine with a share of its GPU set aside has room in it for its weights
        and the keys and values of one longest sequence: vLLM does not start without.
        """
        engine = self.engine
        has_a_share = engine.kind == "vllm" or self.machine.engine_gpus > 0
        if not has_a_share:
            return True
        longest = self.config.data.max_prompt_length + self.config.rollout.max_response_length
        return engine.kv_cache >= longest * engine.kv_per_token

    @property
    def fits(self) -> bool:
        return self.engine_fits and self.peak <= self.machine.gpu_memory_gb * GB


def make_plan(config: Config, machine: Machine, rates: Rates | None = None) -> Plan:
    """Plan ``config`` on ``machine``. Raises :class:`UserError` if the layout does not divide the
    model or the GPUs.
    """
    rates = rates or Rates()
    arch = architecture_of(config.model.path)
    _warn_of_positions(arch, config)
    # on GPUs ``auto`` means Transformer Engine, whatever this machine has
    transformer_engine = machine.processor == "gpu" and config.model.transformer_impl != "local"
    layout = Layout.of(config.parallel, transformer_engine)
    check_layout(arch, layout)
    check_model_rules(config, arch, chunk_layers(arch.num_layers, layout))
    context_parallel = config.parallel.context_parallel_size
    replicas = _check_gpus(layout, context_parallel, machine.gpus)
    data_parallel = replicas // context_parallel
    work, micro_batches = _work(
        config=config, layout=layout, machine=machine, data_parallel=data_parallel
    )
    engine = engine_memory(arch, config, machine)
    stages = tuple(
        _stage(
            arch=arch,
            layout=layout,
            config=config,
            stage=stage,
            replicas=replicas,
            micro_batches=micro_batches,
            engine=engine,
        )
        for stage in range(layout.pipeline_model_parallel_size)
    )
    largest = max(stages, key=lambda stage: stage.state.buffer_numel)
    traffic = step_traffic(
        arch=arch, layout=layout, config=config, replicas=replicas, state=largest.state, work=work
    )
    resharding = _resharding(
        arch=arch, layout=layout, config=config, engine=engine, replicas=replicas
    )
    load = StepLoad(
        work=work,
        engine=engine,
        decoding=rollout_steps(config, engine, work),
        traffic=traffic,
        resharding=resharding,
    )
    teacher = None
    if config.objective.teacher_directory:
        teacher = architecture_of(config.objective.teacher_directory)
        check_layout(teacher, layout)
    seconds = step_seconds(
        arch=arch, layout=layout, config=config, load=load, machine=machine, rates=rates
    )
    if teacher is not None:
        seconds = replace(seconds, teacher=pass_seconds(teacher, layout, work, machine, rates))
    return Plan(
        arch=arch,
        layout=layout,
        config=config,
        machine=machine,
        rates=rates,
        data_parallel=data_parallel,
        tokens_per_micro_batch=micro_batches.tokens,
        micro_batches=micro_batches.count,
        stages=stages,
        load=load,
        seconds=seconds,
    )


def _warn_of_positions(arch: Architecture, config: Config) -> None:
    """Say if the longest prompt and response that the options allow are more than the model has
    positions. A run refuses it where the data has such a prompt, which a plan does not read.
    """
    prompt = config.data.max_prompt_length
    response = config.rollout.max_response_length
    if prompt + response > arch.max_position_embeddings:
        logger.warning(
            "data.max_prompt_length=%d and rollout.max_response_length=%d are more than %s has "
            "positions (max_position_embeddings=%d); a run is refused if a prompt is that long",
            prompt,
            response,
            config.model.path,
            arch.max_position_embeddings,
        )


def _check_gpus(layout: Layout, context_parallel_size: int, gpus: int) -> int:
    """Return how many ranks hold the same part of the model: data- times context-parallel size."""
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus {gpus} is outside 1 ... {MOST_GPUS}")
    tp = layout.tensor_model_parallel_size
    pp = layout.pipeline_model_parallel_size
    check_world_size(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=context_parallel_size,
        processes=gpus,
        experts=layout.expert_model_parallel_size * layout.expert_tensor,
    )
    return gpus // (tp * pp)


def _work(
    config: Config, layout: Layout, machine: Machine, data_parallel: int
) -> tuple[Work, MicroBatches]:
    """Return the work of a step and the micro-batches of an update."""
    training = config.training
    prompt = config.data.max_prompt_length
    longest = config.rollout.max_response_length
    mean = machine.response_tokens or longest
    if not 0 < mean <= longest:
        raise UserError(
            f"--response-tokens {mean} is outside 1 ... rollout.max_response_length={longest}"
        )
    responses = config.most_groups * config.rollout.group_size
    per_rank = -(-responses // training.updates_per_rollout // data_parallel) or 1
    sequence = prompt + longest
    if config.parallel.sequence_packing:
        tokens = min(max(training.max_tokens_per_micro_batch, sequence), per_rank * sequence)
        samples = max(1, training.max_tokens_per_micro_batch // (prompt + mean))
    else:
        samples = min(training.micro_batch_size, per_rank)
        tokens = samples * sequence
    multiple = _token_multiple(config, layout)
    tokens = -(-tokens // multiple) * multiple
    rounds = 1
    if layout.virtual_pipeline_model_parallel_size > 1:
        rounds = layout.pipeline_model_parallel_size
    count = -(-per_rank // (samples * rounds)) * rounds
    context_parallel = config.parallel.context_parallel_size
    scored = math.ceil(tokens * longest / sequence)
    micro_batches = MicroBatches(
        tokens=tokens, scored=math.ceil(scored / context_parallel), count=count
    )
    work = Work(
        tokens=responses * (prompt + mean),
        length=prompt + mean,
        response_length=mean,
        micro_batches=count * training.updates_per_rollout,
        forward_passes=_forward_passes(config),
        updates=training.updates_per_rollout,
    )
    return work, micro_batches


def _token_multiple(config: Config, layout: Layout) -> int:
    """Return the number of which the tokens of a micro-batch are a multiple."""
    multiple = 1
    if config.parallel.sequence_parallel:
        multiple = layout.tensor_model_parallel_size
    if config.parallel.context_parallel_size > 1:
        multiple = config.parallel.context_parallel_size * math.lcm(2, multiple)
    return multiple


def _forward_passes(config: Config) -> int:
    """Return how many passes without gradient a step makes over its tokens by a policy of the
    trained one's size: one for old log-probs, one for the reference policy's.
    """
    method = build_method(config.objective)
    several_updates = config.training.updates_per_rollout > 1
    by_trainer = several_updates and method.options.old_logprobs == "trainer"
    return int(by_trainer or method.needs_old_logprobs) + int(_has_reference(config))


def _has_reference(config: Config) -> bool:
    return any(build_method(config.objective).options.blocks("kl_coef"))


def _stage(
    arch: Architecture,
    layout: Layout,
    config: Config,
    stage: int,
    replicas: int,
    micro_batches: MicroBatches,
    engine: EngineMemory,
) -> Stage:
    state = stage_state(
        arch=arch, layout=layout, config=config, stage=stage, data_parallel=replicas
    )
    activations = stage_activations(
        arch=arch,
        layout=layout,
        config=config,
        stage=stage,
        tokens=micro_batches.tokens // config.parallel.context_parallel_size,
        responses=micro_batches.scored,
        micro_batches=micro_batches.count,
    )
    weights = state.numel * dtype_bytes(config.model.params_dtype)
    resting = state.total
    offloaded = 0
    if config.training.offload_optimizer_during_rollout:
        offloaded = state.main_params + state.moments
        resting = state.total - offloaded - state.gradients
    reference = 0
    if _has_reference(config) and not config.frozen:  # a frozen policy is its own reference
        reference = weights
    teacher = 0
    if config.objective.teacher_directory:
        teacher = _teacher_weights(layout=layout, config=config, stage=stage, replicas=replicas)
    return Stage(
        stage=stage,
        state=state,
        activations=activations,
        reference=reference,
        teacher=teacher,
        engine=engine.resident,
        resting=resting,
        host_copies=offloaded + reference + teacher,
        saved=_saved(layout, config, state, replicas),
    )


def _teacher_weights(layout: Layout, config: Config, stage: int, replicas: int) -> int:
    """Return the bytes of the teacher's weights on a rank of a stage."""
    state = stage_state(
        arch=architecture_of(config.objective.teacher_directory),
        layout=layout,
        config=replace(config, model=replace(config.model, adapter=None)),
        stage=stage,
        data_parallel=replicas,
    )
    return state.numel * dtype_bytes(config.model.params_dtype)


def _saved(layout: Layout, config: Config, state: State, replicas: int) -> int:
    """Return the bytes that one rank writes to a checkpoint: optimizer state, a share of the
    weights that other ranks hold as well, and an adapter without its gradients.
    """
    if config.parallel.use_distributed_optimizer:
        optimizer = 12 * state.shard_numel
    else:
        optimizer = (state.main_params + state.moments) // replicas
    weights = state.numel * dtype_bytes(config.model.params_dtype)
    experts = weights * state.expert_numel // max(state.buffer_numel, 1)
    share = (weights - experts) // replicas + experts // expert_replicas(layout, replicas)
    return optimizer + share + state.adapter * 3 // 4


def _resharding(
    arch: Architecture, layout: Layout, config: Config, engine: EngineMemory, replicas: int
) -> int:
    """Return the bytes that the busiest rank has to wait for in a weight synchronization: those
    that it receives, which is the part of its engine without the part that it holds; or, with
    servers, those that the trainer's rank 0 sends, the whole model once to the group of each.
    """
    itemsize = dtype_bytes(config.model.params_dtype)
    if engine.kind == "server":
        if not engine.weights:
            return 0
        groups = 1
        if config.rollout.weight_transfer == "nccl":
            groups = max(1, len(config.rollout.endpoint))
        return groups * broadcasts(arch, itemsize).nbytes
    replicas = replicas * layout.tensor_model_parallel_size // layout.width
    return most_received(
        arch=arch,
        layout=layout,
        engine_tensor_model_parallel_size=engine.tensor_model_parallel_size,
        replicas=replicas,
        itemsize=itemsize,
    )


# ---------------------------------------------------------------------------------------- the model


def architecture_of(path: str) -> Architecture:
    """Return the architecture of a model directory, or of the public model of that name. Raises
    :class:`UserError` if there is neither, or if the weights in the directory are not those that
    its ``config.json`` describes.
    """
    directory = directory_of(path)
    arch = read_architecture(directory)
    if hub.parse(path) is None and any(directory.glob("*.safetensors")):
        from megatron_dcpo.weights.hf_checkpoint import HFReader  # imports torch

        HFReader(path, arch).check(arch)
    return arch


def directory_of(path: str) -> Path:
    """Return the directory with the ``config.json`` of a model directory, or of the public model of
    that name. Raises :class:`UserError` if it cannot be had.
    """
    model = hub.parse(path)
    if model is None:
        return Path(path)
    if (MODELS / model.repository).is_dir():
        return MODELS / model.repository
    return _fetched(model)


@functools.cache
def _fetched(model: hub.HubModel) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        file = hf_hub_download(model.repository, "config.json", revision=model.revision or None)
        return Path(file).parent
    except (OSError, ValueError) as error:  # from the network, the hub, or its rules for names
        known = sorted(
            file.parent.relative_to(MODELS).as_posix() for file in MODELS.glob("*/*/config.json")
        )
        raise UserError(
            f"model.path={model.name} is not a directory, and its config.json cannot be had from "
            f"the hub ({one_line(error, 150)}); put that file into {model.repository}/, or use a "
            f"model that is known here: {', '.join(known)}"
        ) from None


# ------------------------------------------------------------------------------------ as plain data


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, sizes in bytes and times in seconds."""
    layers_of = layers_per_stage(plan.arch.num_layers, plan.layout)
    seconds = asdict(plan.seconds)
    seconds["total"] = plan.seconds.total
    seconds["beside_training"] = plan.seconds.beside
    seconds["range"] = list(plan.step_range)
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
        "training_bytes": plan.training_bytes,
        "rollout_bytes": plan.rollout_bytes,
        "saving_bytes": plan.saving_bytes,
        "host_bytes_per_node": plan.host_bytes,
        "peak_bytes": plan.peak,
        "gpu_memory_bytes": int(plan.machine.gpu_memory_gb * GB),
        "fits": plan.fits,
        "bytes_sent_per_step": asdict(plan.traffic),
        "resharding_bytes": plan.resharding,
        "step_seconds": seconds,
        "signal_lead_seconds": plan.signal_lead,
        "assumptions": {
            **asdict(plan.rates),
            "reserve_gb": plan.machine.reserve_gb,
            "response_tokens": plan.work.response_length,
            "prompt_tokens": plan.config.data.max_prompt_length,
            "layers": "transformer_engine" if plan.layout.transformer_engine else "local",
            "engine": plan.engine.kind,
            "rehearsed": plan.rehearsed is not None,
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
        "teacher": stage.teacher,
        "engine_resident": stage.engine,
        "total": stage.total,
        "resting": stage.resting,
        "saving": stage.saving,
        "host_copies": stage.host_copies,
        "saved": stage.saved,
    }
