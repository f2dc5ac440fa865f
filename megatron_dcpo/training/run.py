"""Everything a run is made of, built once and wired: the parts of ``training/loop.py``."""

from __future__ import annotations

import datetime
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.config import Config, RunConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.token_bytes import TokenBytes, token_bytes
from megatron_dcpo.objectives import Method, build_method
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.policy.optimizer import Offload, Optimizer, PolicyOptimizer, on_host
from megatron_dcpo.rollout.engine import Engine
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.local_engine import build_local_engine
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.runtime import distributed, hub
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.distributed import Collectives, Topology
from megatron_dcpo.runtime.host_memory import Movable, ledger
from megatron_dcpo.runtime.plugins import load_part
from megatron_dcpo.runtime.watchdog import Timers, Watchdog
from megatron_dcpo.training.checkpointer import Checkpointer, Identity, MegatronModel
from megatron_dcpo.training.generation import Agents, Generation, Stream
from megatron_dcpo.training.loggers import check_loggers
from megatron_dcpo.training.preflight import (
    SERVED_TEACHER,
    check_lengths,
    check_model,
    check_processes,
    check_teacher,
    check_tokens,
    teachers_of_sources,
)
from megatron_dcpo.training.provenance import date_of
from megatron_dcpo.training.recorder import Recorder, Texts
from megatron_dcpo.training.rollouts import (
    AsyncRollouts,
    Rollouts,
    RolloutsInTurn,
    SavedRollouts,
)
from megatron_dcpo.training.sampler import Sampler
from megatron_dcpo.training.selection import Selection
from megatron_dcpo.training.sources import (
    LoadedSource,
    build_draw,
    build_judge,
    contradictions,
    fingerprint_of,
    load_sources,
    trained_problems,
)
from megatron_dcpo.training.trainer import Trainer
from megatron_dcpo.training.updater import (
    Callback,
    Reading,
    Reference,
    Teacher,
    Updater,
    load_callback,
    logprobs_of,
)
from megatron_dcpo.training.validation import HeldOutProblems, Validator
from megatron_dcpo.training.warnings import too_few
from megatron_dcpo.training.weight_sync import WeightSync
from megatron_dcpo.types import Judgement
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.reshard import plan_for

logger = logging.getLogger(__name__)

# parts that some runs need
_SERVER = "megatron_dcpo.rollout.vllm_server:ServerEngine"
_TAKE_STREAM = "megatron_dcpo.rollout.vllm_host:take_stream"
_ADAPTER = "megatron_dcpo.policy.adapter:build_adapter_optimizer"
_AGENTS = "megatron_dcpo.training.agent_rollout:build_agent_rollout"
_HELD_OUT = "megatron_dcpo.evaluation.held_out:load_held_out"
_VALIDATOR = "megatron_dcpo.training.held_out_validator:HeldOutValidator"


@dataclass(frozen=True)
class Run:
    """The parts of a training run on this rank. ``validator`` is None when nothing is validated."""

    config: Config
    directory: Path
    policy: Policy
    optimizer: Optimizer
    offload: Offload
    engine: Engine
    timers: Timers
    rollouts: Rollouts
    updater: Updater
    weight_sync: WeightSync
    checkpointer: Checkpointer
    recorder: Recorder
    validator: Validator | None
    selection: Selection

    @property
    def records(self) -> Recorder:
        """Return the records, as any training calls them."""
        return self.recorder


@dataclass(frozen=True)
class Inputs:
    """What a run reads before anything is allocated: all of it has been checked."""

    method: Method
    callback: Callback | None
    tokenizer: PreTrainedTokenizerBase
    sources: list[LoadedSource]
    held_out: HeldOutProblems | None
    judge: Callable[..., Sequence[Judgement | None]]  # takes the end tokens of the engine too


@contextmanager
def build(config: Config) -> Iterator[Run]:
    """Open a run: check what it reads, then build all parts. Collective.

    Raises :class:`UserError` on bad input.
    """
    inputs = read_inputs(config)
    topology = open_topology(config)
    _check_same_prompts(inputs.sources)
    if topology.rank == 0:
        _warn_of_few_problems(config, inputs.sources)
    directory = Path(config.run_dir)
    watch = start_watch(directory, topology)
    timers = Timers(watch)

    _let_vllm_choose_the_stream(config)
    policy = build_policy(config.model, config.parallel, topology, training=not config.frozen)
    ledger.put("weights", sum(p.nbytes for chunk in policy.gpt for p in chunk.parameters()))
    optimizer = build_optimizer(config, policy)
    reference = None
    if any(inputs.method.options.blocks("kl_coef")):
        reference = build_reference(config, optimizer)
    teacher = teacher_of(config, topology)
    # The engine measures how much of the device is free: offload what the rollout does not need
    # before the engine starts.
    offload = Offload(
        policy, optimizer.megatron, wanted=config.training.offload_optimizer_during_rollout
    )
    offload.offload()
    engine = build_engine(config, topology, inputs.held_out)
    weight_sync = build_weight_sync(config, policy, optimizer, engine)
    agents = agent_rollout(config, inputs, engine) if config.rollout.runs_agents else None
    stream = agents.stream if agents is not None else None
    rollouts = build_rollouts(config, inputs, engine, stream, watch, timers)
    updater = build_updater(
        config=config,
        method=inputs.method,
        callback=inputs.callback,
        policy=policy,
        optimizer=optimizer,
        reference=reference,
        teacher=teacher,
    )
    saver = build_saver(config, topology)
    checkpointer = Checkpointer(
        saver=saver,
        model=MegatronModel(policy, optimizer),
        parts={"rollouts": SavedRollouts(rollouts), "updater": updater},
        identity=Identity(
            seed=config.seed,
            data={"prompts_per_step": config.data.prompts_per_step, "shuffle": config.data.shuffle},
            fingerprint=fingerprint_of(inputs.sources),
        ),
        on_device=state_on_device(engine, offload),
        topology=topology,
        training=config.training,
    )
    recorder = Recorder(
        directory=directory,
        config=config,
        policy=policy,
        texts=Texts(partial(decode, inputs.tokenizer), engine.eos_token_ids),
        topology=topology,
        timers=timers,
        saver=saver,
    )
    recorder.counts = {source.path: len(source.prompts) for source in inputs.sources}
    run = Run(
        config=config,
        directory=directory,
        policy=policy,
        optimizer=optimizer,
        offload=offload,
        engine=engine,
        timers=timers,
        rollouts=rollouts,
        updater=updater,
        weight_sync=weight_sync,
        checkpointer=checkpointer,
        recorder=recorder,
        validator=build_validator(config, inputs, engine, stream, watch, timers),
        selection=Selection(config.training.keep_best, config.training.early_stop),
    )
    with watch, ExitStack() as stack:
        if agents is not None:
            stack.callback(agents.close)
        stack.push(rollouts.close)
        yield run


def read_inputs(config: Config) -> Inputs:
    """Read and check model, tokenizer, data and judge, the cheap checks first. Raises
    :class:`UserError`.
    """
    method = build_method(config.objective)
    callback = load_callback(config.training.callback)
    arch = check_model(config)
    check_processes(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_loggers(config)
    tokenizer = load_tokenizer(config.model.path)
    vocabulary = token_bytes(tokenizer)
    check_tokens(config, arch, vocabulary)
    check_teacher(config, arch, tokenizer, vocabulary)
    date = date_of(config)
    sources = load_sources(config, tokenizer, date)
    held_out = load_held_out(config, tokenizer, vocabulary, date)
    check_lengths(config, arch, sources, held_out)
    overlap = trained_problems(sources, held_out.prompts.values()) if held_out else ""
    for line in filter(None, (overlap, contradictions(sources))):
        logger.warning(line)
    return Inputs(
        method=method,
        callback=callback,
        tokenizer=tokenizer,
        sources=sources,
        held_out=held_out,
        judge=build_judge(config, sources, tokens=vocabulary),
    )


def load_held_out(
    config: Config, tokenizer: PreTrainedTokenizerBase, tokens: TokenBytes, date: datetime.date
) -> HeldOutProblems | None:
    """Return the problems that ``evaluation.benchmarks`` holds out; None if nothing is validated.
    Raises :class:`UserError`.
    """
    if not config.evaluation.interval:
        return None
    held_out: HeldOutProblems = load_part(_HELD_OUT)(config, tokenizer, tokens, date)
    return held_out


def _check_same_prompts(sources: Sequence[LoadedSource]) -> None:
    """Raise :class:`UserError` on every rank if they have read different prompts. Collective."""
    if len(set(distributed.all_gather_objects(fingerprint_of(sources)))) > 1:
        raise UserError(
            "the ranks have read different prompts: data.path, data.template or the date has "
            "changed while they started, or it is another file on another node; start the run "
            "again"
        )


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of ``token_ids``, special tokens included."""
    return str(tokenizer.decode(list(token_ids)))


def _warn_of_few_problems(config: Config, sources: list[LoadedSource]) -> None:
    problems = sum(len(source.prompts) for source in sources)
    text = too_few(problems, "problems", "data.prompts_per_step", config.data.prompts_per_step)
    if text:
        logger.warning("%s: %s", ", ".join(source.path for source in sources), text)


# ---------------------------------------------------------------------------- processes
def open_topology(config: RunConfig) -> Topology:
    """Open the process groups of a configuration; return this rank's position in them. Collective.
    Raises :class:`UserError` if the ranks would start from different models.
    """
    topology = distributed.initialize(
        config.parallel.sizes,
        seed=config.seed,
        timeout_minutes=config.parallel.distributed_timeout_minutes,
    )
    commits = distributed.all_gather_objects(hub.commit_of(config.model.path))
    if len(set(commits)) > 1:
        raise UserError(
            f"the ranks have taken different commits of {hub.name_of(config.model.path)}, which "
            "has changed on the hub while they started, or whose cache on a node is old; start the "
            f"run again, or name one: model.path={hub.exact_name(config.model.path)}"
        )
    return topology


def start_watch(directory: Path, topology: Topology) -> Watchdog:
    """Start what notices a rank that no longer moves, by heartbeats in the run directory."""
    heartbeat = directory / "heartbeat"
    return Watchdog(heartbeat, topology.rank, topology.world_size).start()


# ---------------------------------------------------------------------------- policy and optimizer
def build_optimizer(config: RunConfig, policy: Policy) -> Optimizer:
    """Return the optimizer of the policy's parameters, or of the adapter of ``model.adapter``,
    which is added to the policy.
    """
    if config.model.adapter is None:
        return PolicyOptimizer(policy, config)
    optimizer: Optimizer = load_part(_ADAPTER)(config, policy)
    return optimizer


def build_weight_sync(
    config: Config, policy: Policy, optimizer: Optimizer, engine: Engine
) -> WeightSync:
    """Return what hands the policy's weights to this rank's engine, with its plan."""
    topology = policy.topology
    return WeightSync(
        policy=policy,
        optimizer=optimizer,
        engine=engine,
        plan=plan_for(
            policy=optimizer.exported,
            engine_tensor_model_parallel_size=engine.tensor_model_parallel_size,
            bucket_bytes=config.rollout.bucket_bytes,
            names=tensors_to_hand_over(config, topology),
        ),
        topology=topology,
    )


def tensors_to_hand_over(config: Config, topology: Topology) -> tuple[str, ...] | None:
    """Return the tensors that the ranks of this replica put together for their engines: all, which
    is None, or none of them where servers get theirs from rank 0, which is in another replica.
    """
    if config.rollout.engine == "server" and topology.replica != 0:
        return ()
    return None


def build_reference(
    config: Config, optimizer: Optimizer, reader: HFReader | None = None
) -> Reference:
    """Return what opens the starting policy: a frozen policy without its adapter, or else a second
    policy whose parameters wait on the host. ``reader``: as for :func:`build_policy`.
    """
    if optimizer.starting_policy is not None:
        return optimizer.starting_policy
    topology = optimizer.exported.topology
    policy = build_policy(config.model, config.parallel, topology, training=False, reader=reader)
    return partial(_on_device, policy, on_host(policy, "reference"))


def teacher_of(config: Config, topology: Topology) -> Teacher | None:
    """Return what opens the teacher, a frozen policy or a server, if there is one."""
    if not config.objective.teacher:
        return None
    if config.objective.teacher_is_served:
        named = teachers_of_sources(config)
        opened: Teacher = load_part(SERVED_TEACHER).of(config.objective.teacher, named).opened
        return opened
    return reading_of(build_teacher(config, topology))


def reading_of(frozen: Reference) -> Teacher:
    """Return what opens a frozen policy as a teacher."""

    @contextmanager
    def opened() -> Iterator[Reading]:
        with frozen() as policy:
            yield partial(logprobs_of, policy)

    return opened


def build_teacher(config: Config, topology: Topology, reader: HFReader | None = None) -> Reference:
    """Return what opens the teacher: a frozen policy in the policy's layout, whose parameters wait
    on the host. ``reader``: as for :func:`build_policy`.
    """
    model = replace(config.model, path=config.objective.teacher, adapter=None)
    policy = build_policy(model, config.parallel, topology, training=False, reader=reader)
    return partial(_on_device, policy, on_host(policy, "teacher"))


@contextmanager
def _on_device(policy: Policy, parameters: Movable) -> Iterator[Policy]:
    with parameters.on_device():
        yield policy


def build_updater(
    config: Config,
    method: Method,
    callback: Callback | None,
    policy: Policy,
    optimizer: Optimizer,
    reference: Reference | None,
    teacher: Teacher | None,
) -> Updater:
    """Return the updater of the policy."""
    trainer = Trainer(
        policy=policy,
        optimizer=optimizer,
        parallel=config.parallel,
        training=config.training,
        temperature=config.rollout.temperature,
    )
    return Updater(
        trainer=trainer,
        method=method,
        reference=reference,
        teacher=teacher,
        callback=callback,
        config=config,
    )


# ---------------------------------------------------------------------------- engine and rollouts
def _let_vllm_choose_the_stream(config: Config) -> None:
    """Do so before the policy is built, where vLLM will communicate in this process."""
    rollout = config.rollout
    if rollout.engine == "server":
        communicates = rollout.weight_transfer == "nccl"
    else:
        communicates = rollout.engine != "transformers" and rollout.tensor_model_parallel_size > 1
    if communicates:
        load_part(_TAKE_STREAM)()


def build_engine(
    config: Config, topology: Topology, held_out: HeldOutProblems | None = None
) -> Engine:
    """Return this rank's engine. Its weights are placeholders until the policy's are handed
    over. Raises :class:`UserError`.
    """
    rollout = config.rollout
    if rollout.engine == "server":
        exchange = Path(config.run_dir) / "engine_weights"
        server: Engine = load_part(_SERVER)(
            endpoints=rollout.endpoint,
            model_dir=config.model.path,
            exchange=exchange if rollout.weight_transfer == "files" else None,
            rank=topology.rank,
            concurrency=rollout.max_num_seqs,
            quantization=rollout.quantization,
        )
        return server
    size = rollout.tensor_model_parallel_size
    engines = topology.world_size // size
    prompts_of_engine = math.ceil(rollout.oversample * config.data.prompts_per_step / engines)
    arguments = dict(rollout.vllm)  # what no option of ours sets is passed on by name
    dtype = arguments.pop("dtype", config.model.params_dtype)
    max_model_len = arguments.pop("max_model_len", 0) or longest_sequence(config, held_out)
    sleep = arguments.pop("enable_sleep_mode", True)
    return build_local_engine(
        rollout.engine,
        config.model.path,
        EngineOptions(
            dtype=dtype,
            head_dtype=config.model.head_dtype,
            tensor_model_parallel_size=size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_model_len=max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            responses=prompts_of_engine * rollout.group_size,
            sleep=sleep,
            record_experts=rollout.routing_replay,
            dummy_weights=True,
            seed=config.seed,
            arguments=arguments,
        ),
    )


def longest_of(config: Config) -> int:
    """Return :func:`longest_sequence` of a configuration whose data has not been read: what a
    server must be able to hold. Raises :class:`UserError` as reading the held-out problems does.
    """
    if not config.evaluation.benchmarks:
        return longest_sequence(config, None)
    tokenizer = load_tokenizer(config.model.path)
    held_out = load_held_out(config, tokenizer, token_bytes(tokenizer), date_of(config))
    return longest_sequence(config, held_out)


def longest_sequence(config: Config, held_out: HeldOutProblems | None) -> int:
    """Return the tokens of the longest prompt and response that the engine may have to hold.

    Raises :class:`UserError` when ``rollout.vllm.max_model_len`` is less than validation needs.
    """
    response = config.rollout.max_response_length
    trained = config.data.max_prompt_length + response
    if held_out is None:
        return trained
    validated = held_out.longest + (config.evaluation.max_tokens or response)
    max_model_len = config.rollout.vllm.get("max_model_len", 0)
    if 0 < max_model_len < validated:
        raise UserError(
            f"rollout.vllm.max_model_len={max_model_len} is less than the {validated} tokens that "
            "evaluation.benchmarks may need; raise it, leave it out, or lower evaluation.max_tokens"
        )
    return max(trained, validated)


def build_rollouts(
    config: Config,
    inputs: Inputs,
    engine: Engine,
    agents: Stream | None,
    watch: Watchdog,
    timers: Timers,
) -> Rollouts:
    """Return what samples the batches: in turn with the training, or alongside it."""
    asynchronous = config.generates_ahead
    collectives = Collectives()
    if asynchronous:
        # The thread that samples communicates while the main thread trains.
        group = distributed.second_group(config.parallel.distributed_timeout_minutes)
        collectives = Collectives(group)
    sampler = Sampler(
        draw=build_draw(config, inputs.sources),
        generation=Generation(
            engine=engine,
            collectives=collectives,
            watch=watch,
            agents=agents,
        ),
        judge=partial(inputs.judge, eos_ids=engine.eos_token_ids),
        method=inputs.method,
        timers=Timers(None) if asynchronous else timers,
        config=config,
    )
    if not asynchronous:
        return RolloutsInTurn(sampler)
    return AsyncRollouts(sampler=sampler, timers=timers, last_step=config.training.steps)


def agent_rollout(config: Config, inputs: Inputs, engine: Engine) -> Agents:
    """Return what runs agents with this rank's engine."""
    agents: Agents = load_part(_AGENTS)(
        config=config,
        engine=engine,
        tokenizer=inputs.tokenizer,
        sequence_tokens=longest_sequence(config, inputs.held_out),
    )
    return agents


def build_validator(
    config: Config,
    inputs: Inputs,
    engine: Engine,
    agents: Stream | None,
    watch: Watchdog,
    timers: Timers,
) -> Validator | None:
    """Return what validates the policy, if anything is held out."""
    if inputs.held_out is None:
        return None
    generation = Generation(
        engine=engine,
        collectives=Collectives(),
        watch=watch,
        agents=agents,
    )
    validator: Validator = load_part(_VALIDATOR)(
        held_out=inputs.held_out, generation=generation, timers=timers, config=config
    )
    return validator


# ---------------------------------------------------------------------------- checkpoints
def build_saver(config: RunConfig, topology: Topology) -> Saver:
    """Return the writer of this rank's checkpoints."""
    in_background = config.training.async_save
    if in_background == "auto":
        in_background = capabilities().separate_memory
    return Saver(
        directory=Path(config.run_dir) / "checkpoints",
        rank=topology.rank,
        keep=config.training.keep_checkpoints,
        background=in_background,
        replicas=topology.replica_group,
    )


def state_on_device(engine: Engine, offload: Offload) -> Callable[[], AbstractContextManager[None]]:
    """Return what opens a context in which the engine sleeps and the optimizer's whole state is on
    the device.
    """

    @contextmanager
    def opened() -> Iterator[None]:
        engine.sleep()
        with offload.on_device():
            yield

    return opened
