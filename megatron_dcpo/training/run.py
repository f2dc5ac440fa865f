"""Everything a run is made of, built once and wired: the parts of ``training/loop.py`` and what
they need.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.checkpoints.state import Optimizer
from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.held_out import HeldOut, load_held_out
from megatron_dcpo.judging.judge import JUDGES
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.objectives import build_method
from megatron_dcpo.policy.adapter import Adapter, AdapterOptimizer
from megatron_dcpo.policy.gradient_probe import probe_block_gradients
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.policy.optimizer import Offload, PolicyOptimizer, on_host
from megatron_dcpo.rollout import Engine, build_local_engine, load_tokenizer
from megatron_dcpo.rollout.vllm_host import VllmOptions
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.runtime.host_memory import ledger
from megatron_dcpo.runtime.watchdog import Timers, Watchdog
from megatron_dcpo.training.ahead import ahead_of
from megatron_dcpo.training.checkpointer import Checkpointer
from megatron_dcpo.training.loggers import check_loggers
from megatron_dcpo.training.preflight import (
    check_lengths,
    check_model,
    check_processes,
    check_vocabulary,
)
from megatron_dcpo.training.recorder import Recorder
from megatron_dcpo.training.sampler import Sampler
from megatron_dcpo.training.sources import build_draw, build_judge, fingerprint_of, load_sources
from megatron_dcpo.training.updater import Reference, Updater
from megatron_dcpo.training.validation import Validator
from megatron_dcpo.training.warnings import too_few_problems
from megatron_dcpo.training.weight_sync import WeightSync

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The parts of a training run on this rank. ``validator``: None where ``evaluation.interval``
    is 0.
    """

    config: Config
    directory: Path
    tokenizer: Any
    policy: Policy
    optimizer: Optimizer
    offload: Offload
    engine: Engine
    timers: Timers
    sampler: Sampler
    ahead: Any
    updater: Updater
    weight_sync: WeightSync
    checkpointer: Checkpointer
    recorder: Recorder
    validator: Validator | None


@contextmanager
def build(config: Config) -> Iterator[Run]:
    """Open a run: build all parts, the cheap checks first. Collective.

    Raises :class:`UserError` on bad input.
    """
    method = build_method(config.objective)
    arch = check_model(config)
    check_processes(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_loggers(config)
    tokenizer = load_tokenizer(config.model.path)
    vocabulary = token_bytes(tokenizer)
    check_vocabulary(config, arch, vocabulary)
    sources = load_sources(config, tokenizer)
    held_out = load_held_out(config, tokenizer, vocabulary)
    check_lengths(config, arch, sources, held_out)
    judge = build_judge(config, sources, tokens=vocabulary)
    parallel, directory = config.parallel, Path(config.run_dir)
    topology = distributed.initialize(
        *parallel.sizes, seed=config.seed, timeout_minutes=parallel.distributed_timeout_minutes
    )
    problems = sum(len(source.prompts) for source in sources)
    if topology.rank == 0 and (text := too_few_problems(problems, config.data.prompts_per_step)):
        logger.warning("%s: %s", ", ".join(source.path for source in sources), text)
    watch = Watchdog(directory / "heartbeat", topology.rank, topology.world_size).start()
    timers = Timers(watch)
    policy = build_policy(config.model, parallel, topology, training=not config.frozen)
    ledger.put("weights", sum(p.nbytes for gpt in policy.gpt for p in gpt.parameters()))
    optimizer = build_policy_optimizer(config, policy)
    reference = (
        build_reference(config, optimizer) if any(method.options.blocks("kl_coef")) else None
    )
    # The engine measures what is left of the device: what a rollout does without leaves before it
    # starts.
    offload = Offload(policy, optimizer.megatron, config.training.offload_optimizer_during_rollout)
    offload.offload()
    engine = build_engine(config, topology, held_out)
    saver = build_saver(config, topology)
    weight_sync = WeightSync(
        policy, optimizer, engine, topology, watch, config.rollout.bucket_bytes
    )
    judge, draw = partial(judge, eos_ids=engine.eos_token_ids), build_draw(config, sources)
    parts = (
        draw,
        engine,
        judge,
        JUDGES,
        method,
        weight_sync.recover,
        topology,
        timers,
        config.rollout,
    )
    sampler = Sampler(
        *parts, config.data.prompts_per_step, config.seed, config.judging.max_error_rate
    )
    ahead = ahead_of(sampler, config.training.steps, parallel.distributed_timeout_minutes)
    probe = None
    if isinstance(optimizer, PolicyOptimizer):
        probe = partial(probe_block_gradients, policy, optimizer.megatron)
    updater = Updater(
        policy, optimizer, method, reference, probe, parallel, config.rollout, config.training
    )
    data = {"prompts_per_step": config.data.prompts_per_step, "shuffle": config.data.shuffle}
    identity = {"seed": config.seed, "data": {**data, "fingerprint": fingerprint_of(sources)}}
    checkpointer = Checkpointer(
        directory,
        saver,
        policy,
        optimizer,
        offload,
        engine,
        sampler,
        updater,
        config.training,
        identity,
    )
    validator = None
    if held_out is not None:
        idle = ahead.complete
        validator = Validator(
            held_out, sampler, idle, weight_sync, checkpointer, topology, timers, directory, config
        )
    recorder = Recorder(directory, config, policy, tokenizer.decode, topology, timers, saver)
    run = Run(
        *(config, directory, tokenizer, policy, optimizer, offload, engine, timers),
        *(sampler, ahead, updater, weight_sync, checkpointer, recorder, validator),
    )
    with watch, ExitStack() as stack:
        stack.push(ahead.close)
        yield run


def build_saver(config: Config, topology: Topology) -> Saver:
    """Return the writer of this rank's checkpoints."""
    training = config.training
    asynchronous = (
        capabilities().separate_memory if training.async_save == "auto" else training.async_save
    )
    directory = Path(config.run_dir) / "checkpoints"
    return Saver(
        directory, topology.rank, training.keep_checkpoints, asynchronous, topology.replica_group
    )


def build_policy_optimizer(config: Config, policy: Policy) -> Optimizer:
    """Return the optimizer of the policy's parameters, or of the adapter of ``model.adapter``,
    which is added to it.
    """
    if config.model.adapter is None:
        return PolicyOptimizer(policy, config)
    optimizer = AdapterOptimizer(Adapter(policy, config.model.adapter), config)
    ledger.put("adapter", optimizer.nbytes)
    return optimizer


def build_reference(config: Config, optimizer: Optimizer) -> Reference:
    """Return what opens the starting policy: a frozen one without its adapter, or else a second one
    whose parameters wait on the host.
    """
    if isinstance(optimizer, AdapterOptimizer):
        return partial(_opened, optimizer.adapter.policy, optimizer.adapter.inactive)
    policy = build_policy(config.model, config.parallel, optimizer.policy.topology, training=False)
    return partial(_opened, policy, on_host(policy).on_device)


@contextmanager
def _opened(policy: Policy, opening: Any) -> Iterator[Policy]:
    with opening():
        yield policy


def build_engine(config: Config, topology: Topology, held_out: HeldOut | None = None) -> Engine:
    """Return the engine of this rank, with any weights: the first synchronization brings the
    policy's.
    """
    rollout, size, vllm = (
        config.rollout,
        config.rollout.tensor_model_parallel_size,
        dict(config.rollout.vllm),
    )
    if topology.world_size % size:
        raise UserError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {topology.world_size} "
            "process(es) started"
        )
    longest = config.data.max_prompt_length + rollout.max_response_length
    if held_out:
        validated = held_out.longest + (config.evaluation.max_tokens or rollout.max_response_length)
        longest = max(longest, validated)
        if 0 < vllm.get("max_model_len", 0) < validated:
            raise UserError(
                f"rollout.vllm.max_model_len={vllm['max_model_len']} is less than the {validated} "
                "tokens that "
                "evaluation.benchmarks may need; raise it, leave it out, or lower "
                "evaluation.max_tokens"
            )
    share = math.ceil(
        rollout.oversample * config.data.prompts_per_step / (topology.world_size // size)
    )
    ours = {
        name: vllm.pop(name)
        for name in ("max_model_len", "dtype", "enable_sleep_mode")
        if name in vllm
    }
    if rollout.engine == "server":
        from megatron_dcpo.rollout.vllm_server import ServerEngine

        exchange = (
            Path(config.run_dir) / "engine_weights" if rollout.weight_transfer == "files" else None
        )
        return ServerEngine(rollout.endpoint, config.model.path, exchange, rollout.max_num_seqs)
    return build_local_engine(
        rollout.engine,
        config.model.path,
        VllmOptions(
            dtype=ours.get("dtype", config.model.params_dtype),
            head_dtype=config.model.head_dtype,
            tensor_model_parallel_size=size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_model_len=ours.get("max_model_len") or longest,
            max_num_seqs=rollout.max_num_seqs,
            responses=share * rollout.group_size,
            sleep=ours.get("enable_sleep_mode", True),
            record_experts=rollout.routing_replay,
            dummy_weights=True,
            seed=config.seed,
            arguments=vllm,
        ),
    )
