"""Everything a run is made of, built once: grid, data, policy, optimizer, engine, objective, judge."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.config import Config
from megatron_dcpo.data import load_prompts
from megatron_dcpo.data.datasets import fingerprint
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.heldout import HeldOut, load_held_out
from megatron_dcpo.judging.answers import BOXED, FENCED, AnswerForm
from megatron_dcpo.judging.judge import Verifier, judge_many
from megatron_dcpo.judging.math.pool import verify_answers
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.objectives import Objective, build_objective
from megatron_dcpo.policy.adapter import Adapter, AdapterOptimizer, MergedPolicy
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.policy.optimizer import Offload, build_optimizer, on_host
from megatron_dcpo.rollout import Engine, build_local_engine, load_tokenizer
from megatron_dcpo.rollout.vllm_engine import VllmOptions
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.device import capabilities
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.runtime.host_memory import ledger
from megatron_dcpo.runtime.watchdog import Watchdog
from megatron_dcpo.training.groups import Group
from megatron_dcpo.training.preflight import check_model, check_processes, check_wandb
from megatron_dcpo.types import Judgement, Prompt, Response


@dataclass
class RunState:
    """What changes while a run goes on, beside model and optimizer.

    ``extra_prompts``: consumed so far beyond ``prompts_per_step`` a step, by ``rollout.filter_groups`` and
    ``max_staleness``; ``carried``: what the latter left for the next step; ``rollout``: the last rollout's metrics;
    ``evaluations``: those of the validations so far, by step; ``best_step``: of the checkpoint that ``keep_best`` keeps.
    """

    saved_step: int = 0
    nonfinite_in_a_row: int = 0
    extra_prompts: int = 0
    carried: list[Group] = field(default_factory=list)
    rollout: dict[str, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    best_step: int | None = None


@dataclass(frozen=True)
class TrainingRun:
    """The parts of a training run on this rank. ``optimizer``, ``scheduler``: none where the policy is frozen, and only the
    ``adapter`` is trained. ``reference`` opens the starting policy, where a KL loss asks for it."""

    config: Config
    directory: Path
    topology: Topology
    tokenizer: Any
    prompts: list[Prompt]
    data_fingerprint: str
    policy: Policy
    optimizer: Any
    scheduler: Any
    offload: Offload
    engine: Engine
    objective: Objective
    reference: Callable[[], AbstractContextManager[Policy]] | None
    watch: Watchdog
    saver: Saver
    progress: RunState
    adapter: AdapterOptimizer | None
    held_out: HeldOut | None
    judge: Callable[[Sequence[Response], Mapping[str, Prompt]], list[Judgement]]

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def exported(self) -> Policy:
        """Return the policy as engines and ``policy/`` have it: with its adapter merged."""
        return MergedPolicy.of(self.adapter.adapter) if self.adapter else self.policy


def build_run(config: Config) -> TrainingRun:
    """Build all parts, the cheap checks first. Collective. Raises :class:`UserError` on bad input."""
    objective = build_objective(config.objective)
    check_model(config)
    check_processes(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_wandb(config)
    tokenizer = load_tokenizer(config.model.path)
    vocabulary = token_bytes(tokenizer)
    prompts = load_prompts(
        config.data.path,
        tokenizer,
        config.data.template,
        config.data.max_prompt_length,
        config.data.limit or None,
        marker=config.judging.marker,
        untested=config.data.untested,
    )
    held_out = load_held_out(config, tokenizer, vocabulary)
    verifier, form = build_verifier(config, prompts)
    parallel = config.parallel
    topology = distributed.initialize(
        *parallel.sizes, seed=config.seed, timeout_minutes=parallel.distributed_timeout_minutes
    )
    watch = Watchdog(
        Path(config.run_dir) / "heartbeat", topology.rank, topology.world_size, config.training.phase_warning_seconds
    ).start()
    policy = build_policy(config.model, parallel, topology, training=not config.frozen)
    ledger.put("weights", sum(p.nbytes for gpt in policy.gpt for p in gpt.parameters()))
    optimizer, scheduler = (None, None) if config.frozen else build_optimizer(config, policy)
    adapter = build_adapter(config, policy)
    reference = build_reference(config, topology, adapter) if any(objective.options.blocks("kl_coef")) else None
    # The engine measures what is left of the device: what a rollout does without leaves before it starts.
    offload = Offload(policy, optimizer, config.training.offload_optimizer_during_rollout)
    offload.offload()
    engine = build_engine(config, topology, held_out)
    return TrainingRun(
        config=config,
        directory=Path(config.run_dir),
        topology=topology,
        tokenizer=tokenizer,
        prompts=prompts,
        data_fingerprint=fingerprint(prompts),
        policy=policy,
        optimizer=optimizer,
        scheduler=scheduler,
        offload=offload,
        engine=engine,
        objective=objective,
        reference=reference,
        watch=watch,
        saver=Saver(
            Path(config.run_dir) / "checkpoints",
            topology.rank,
            config.training.keep_checkpoints,
            capabilities().separate_memory if config.training.async_save == "auto" else config.training.async_save,
            topology.replica_group,
        ),
        progress=RunState(),
        adapter=adapter,
        held_out=held_out,
        judge=partial(
            judge_many,
            tokens=vocabulary,
            eos_ids=engine.eos_token_ids,
            marker=config.judging.marker,
            verifier=verifier,
            form=form,
        ),
    )


def build_adapter(config: Config, policy: Policy) -> AdapterOptimizer | None:
    """Return the adapter of ``model.adapter`` on ``policy``, with its optimizer; None without one."""
    if config.model.adapter is None:
        return None
    adapter = Adapter(policy, config.model.adapter)
    steps = config.training.steps * config.training.updates_per_rollout
    optimizer = AdapterOptimizer(adapter, config.optimizer, steps)
    ledger.put("adapter", optimizer.nbytes)
    return optimizer


def build_reference(
    config: Config, topology: Topology, adapter: AdapterOptimizer | None
) -> Callable[[], AbstractContextManager[Policy]]:
    """The starting policy: a frozen one without its adapter, or else a second one whose parameters wait on the host."""
    if adapter is not None:
        return partial(_opened, adapter.adapter.policy, adapter.adapter.inactive)
    policy = build_policy(config.model, config.parallel, topology, training=False)
    return partial(_opened, policy, on_host(policy).on_device)


@contextmanager
def _opened(policy: Policy, opening: Callable[[], AbstractContextManager[Any]]) -> Iterator[Policy]:
    with opening():
        yield policy


def build_engine(config: Config, topology: Topology, held_out: HeldOut | None = None) -> Engine:
    """The engine of this rank, with any weights: the first synchronisation brings the policy's."""
    rollout, size = config.rollout, config.rollout.tensor_model_parallel_size
    if topology.world_size % size:
        raise UserError(
            f"rollout.tensor_model_parallel_size={size} does not divide the {topology.world_size} process(es) started"
        )
    longest = config.data.max_prompt_length + rollout.max_response_length
    if held_out:
        validated = held_out.longest + (config.evaluation.max_tokens or rollout.max_response_length)
        longest = max(longest, validated)
        if 0 < rollout.max_model_len < validated:
            raise UserError(
                f"rollout.max_model_len={rollout.max_model_len} is less than the {validated} tokens that "
                "evaluation.benchmarks may need; raise it, set it to 0, or lower evaluation.max_tokens"
            )
    dtype = config.model.params_dtype if rollout.dtype == "same" else rollout.dtype
    if rollout.engine == "server":
        from megatron_dcpo.rollout.vllm_server import ServerEngine

        exchange = Path(config.run_dir) / "engine_weights" if rollout.weight_transfer == "files" else None
        return ServerEngine(rollout.endpoint, config.model.path, exchange, rollout.max_num_seqs)
    return build_local_engine(
        rollout.engine,
        config.model.path,
        VllmOptions(
            dtype=dtype,
            tensor_model_parallel_size=size,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            max_model_len=rollout.max_model_len or longest,
            max_num_seqs=rollout.max_num_seqs,
            enforce_eager=rollout.enforce_eager,
            kv_cache_memory_bytes=rollout.kv_cache_memory_bytes,
            sleep=rollout.sleep,
            dummy_weights=True,
            seed=config.seed,
        ),
    )


def build_verifier(config: Config, prompts: Sequence[Prompt]) -> tuple[Verifier, AnswerForm]:
    """What decides R, and how answers are marked. Raises :class:`UserError` when the data is for another verifier, or
    when programs cannot be run safely here."""
    tests = {prompt.ground_truth: prompt.tests for prompt in prompts if prompt.tests is not None}
    with_tests = sum(prompt.tests is not None for prompt in prompts)
    if config.judging.verifier == "math":
        if with_tests:
            raise UserError(f"{config.data.path}: {with_tests} programming problems; set judging.verifier=code")
        return verify_answers, BOXED
    if with_tests < len(prompts):
        raise UserError(
            f"{config.data.path}: {len(prompts) - with_tests} of {len(prompts)} problems have no tests; "
            "judging.verifier=code needs programming problems"
        )
    from megatron_dcpo.judging.programs import ProgramVerifier

    return ProgramVerifier(tests, config.judging.limits, config.judging.sandbox), FENCED
