"""The phases of a job on one rank, carried out by the run's own code."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from megatron.core import parallel_state

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import Config
from megatron_dcpo.objectives import build_method
from megatron_dcpo.policy import schedule
from megatron_dcpo.policy.batching import collate, round_up
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.policy.optimizer import Offload
from megatron_dcpo.rehearsal import TENSOR_PARALLEL
from megatron_dcpo.rehearsal.inputs import (
    InventedCheckpoint,
    RehearsedBatch,
    engine_of,
    invented_samples,
    parameter_dtype,
)
from megatron_dcpo.rehearsal.ledger import OperationLedger, Phase
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.runtime.rehearsed_world import (
    GPU,
    Rank,
    rehearsed_world,
    shapes_between_stages,
)
from megatron_dcpo.training.checkpointer import MegatronModel
from megatron_dcpo.training.run import (
    build_optimizer,
    build_reference,
    build_saver,
    build_teacher,
    build_updater,
    build_weight_sync,
    reading_of,
)
from megatron_dcpo.training.trainer import Trainer
from megatron_dcpo.training.updater import Reference
from megatron_dcpo.types import TrainingSample
from megatron_dcpo.weights.reshard import gather_full
from megatron_dcpo.weights.table import hf_shapes


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """What one rank of the job did with a ``batch`` whose micro-batches have ``tokens`` tokens on
    the rank's part of the context.
    """

    rank: int
    stage: int
    batch: RehearsedBatch
    tokens: int
    phases: tuple[Phase, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the rehearsal as plain data."""
        return {
            "rank": self.rank,
            "stage": self.stage,
            "batch": dataclasses.asdict(self.batch),
            "tokens": self.tokens,
            "phases": [phase.as_dict() for phase in self.phases],
        }


def rehearse(config: Config, arch: Architecture, rank: Rank) -> Rehearsal:
    """Go through a step of ``config`` as ``rank``. Raises what the code raises: the first operation
    whose shapes, types or devices do not fit.
    """
    ledger = OperationLedger(GPU if rank.on_gpu else "cpu")
    with rehearsed_world(rank, ledger.told):
        topology = distributed.initialize(config.parallel.sizes, seed=config.seed)
        ledger.groups = _names_of_groups()
        with ledger:
            try:
                batch, tokens = carry_out(config, arch, topology, ledger)
            except Exception as error:
                error.add_note(f"in the phase {ledger.phases[-1].name}")
                raise
        stage = topology.pp_rank
    return Rehearsal(
        rank=rank.rank,
        stage=stage,
        batch=batch,
        tokens=tokens,
        phases=tuple(ledger.phases),
    )


def carry_out(
    config: Config, arch: Architecture, topology: Topology, ledger: OperationLedger
) -> tuple[RehearsedBatch, int]:
    """Go through the phases of a step, with an invented checkpoint, invented responses and an
    invented engine; return the batch and the tokens of a micro-batch. Collective: on real ranks
    the same phases are carried out with real tensors.
    """
    method = build_method(config.objective)
    checkpoint = InventedCheckpoint(arch, parameter_dtype(config))
    with ledger.phase("model"):
        policy = build_policy(
            config.model,
            config.parallel,
            topology,
            training=not config.frozen,
            reader=checkpoint,
        )
    with ledger.phase("optimizer"):
        optimizer = build_optimizer(config, policy)
        reference = None
        if any(method.options.blocks("kl_coef")):
            reference = build_reference(config, optimizer, checkpoint)
        teacher = None
        if config.objective.teacher_directory:
            of_teacher = read_architecture(config.objective.teacher_directory)
            reader = InventedCheckpoint(of_teacher, parameter_dtype(config))
            teacher = build_teacher(config, topology, reader)
    offload = Offload(
        policy, optimizer.megatron, wanted=config.training.offload_optimizer_during_rollout
    )
    engine = engine_of(arch, config)
    weight_sync = build_weight_sync(config, policy, optimizer, engine)
    updater = build_updater(
        config=config,
        method=method,
        callback=None,
        policy=policy,
        optimizer=optimizer,
        reference=reference,
        teacher=None,
    )
    batch = batch_to_rehearse(config, topology)
    for name, part in (("first update", batch.least()), ("update", batch)):
        samples = invented_samples(config, part)
        scores = None if method.needs_old_logprobs else method.group_scores(samples)
        updater.updates_per_rollout = part.updates
        shape = _shape_between_stages(updater.trainer, samples[: len(samples) // part.updates])
        if teacher is not None:
            between = partial(_between_its_stages, teacher, shape)
            updater.teacher = reading_of(between)
        offload.reload()
        last = _last_stage(config, part, topology)
        with ledger.phase(name), shapes_between_stages(shape), last:
            updater.update(samples, scores, 1)
        offload.offload()
    with ledger.phase("weights to the engine"):
        weight_sync.push(1)
    with ledger.phase("checkpoint"), tempfile.TemporaryDirectory() as scratch:
        saved = dataclasses.replace(config, run_dir=scratch)
        saver = build_saver(saved, topology)
        with offload.on_device(), patch.object(saver, "_run", lambda *_: None):
            saver.begin(1, MegatronModel(policy, optimizer).state(1, _nothing()))
    with ledger.phase("export"):
        gather_full(optimizer.exported, hf_shapes(arch))
    tokens = math.prod(shape[:2])
    if config.parallel.sequence_parallel:
        tokens *= topology.tp_size
    return batch, tokens


@contextmanager
def _between_its_stages(teacher: Reference, shape: tuple[int, int, int]) -> Iterator[Policy]:
    """Open the teacher, between whose stages hidden states have its size, not the policy's as in
    ``shape``.
    """
    with teacher() as policy, shapes_between_stages((*shape[:2], policy.arch.hidden_size)):
        yield policy


def _nothing() -> dict[str, object]:
    """Return the parts of a checkpoint that are no tensors."""
    return {"seed": 0, "data": {}, "engine": {"weights_version": 1}, "parts": {}}


def batch_to_rehearse(config: Config, topology: Topology) -> RehearsedBatch:
    """Return the least batch that shows all of a step: two updates if the job has several, and in
    each one micro-batch more than a stage of the pipeline ever has in flight, if the job has them.
    """
    parallel = config.parallel
    training = config.training
    length = config.data.max_prompt_length + config.rollout.max_response_length
    responses = config.most_groups * config.rollout.group_size
    of_rank = max(1, responses // training.updates_per_rollout // topology.dp_size)
    in_one = training.micro_batch_size
    if parallel.sequence_packing:
        in_one = max(1, training.max_tokens_per_micro_batch // length)
    in_one = min(in_one, of_rank)
    rounds = 1
    count = topology.pp_size + 1
    if parallel.virtual_pipeline_model_parallel_size > 1:
        rounds = topology.pp_size
        count = 2 * topology.pp_size
    count = round_up(min(count, math.ceil(of_rank / in_one)), rounds)
    return RehearsedBatch(
        responses=topology.dp_size * in_one,
        micro_batches=count,
        rounds=rounds,
        most_of_group=config.rollout.group_size,
        updates=min(2, training.updates_per_rollout),
    )


def _last_stage(
    config: Config, batch: RehearsedBatch, topology: Topology
) -> AbstractContextManager[object]:
    """Have the last pipeline stage say the log-probs of a batch to the others."""
    if topology.is_last_stage:
        return nullcontext()
    of_response = np.ones(config.rollout.max_response_length, np.float32)
    of_micro_batch = [of_response] * (batch.responses // topology.dp_size)
    said = [of_micro_batch] * batch.micro_batches
    return patch.object(schedule, "broadcast_from_last_stage", lambda *_: said)


def _shape_between_stages(
    trainer: Trainer, samples: Sequence[TrainingSample]
) -> tuple[int, int, int]:
    """Return the shape of the hidden states between pipeline stages, [s, b, h]; all micro-batches
    have the same.
    """
    policy = trainer.policy
    parallel = trainer.parallel
    topology = policy.topology
    indices, micro_batches = trainer.deal(samples)
    first = next(
        collate(
            [samples[index] for index in indices],
            micro_batches[:1],
            packing=parallel.sequence_packing,
            multiple_of=topology.tp_size if parallel.sequence_parallel else 1,
            context_parallel=(topology.cp_rank, topology.cp_size),
        )
    )
    rows, width = first.tokens.shape
    if parallel.sequence_parallel:
        width //= topology.tp_size
    return width, rows, policy.arch.hidden_size


def _names_of_groups() -> dict[str, str]:
    """Return the names of the process groups, by torch's own."""
    groups = (
        (TENSOR_PARALLEL, parallel_state.get_tensor_model_parallel_group()),
        ("pipeline", parallel_state.get_pipeline_model_parallel_group()),
        ("context parallel", parallel_state.get_context_parallel_group()),
        ("data parallel", parallel_state.get_data_parallel_group()),
        ("data parallel", parallel_state.get_data_parallel_group(with_context_parallel=True)),
        ("experts", parallel_state.get_expert_model_parallel_group()),
        ("replicas of experts", parallel_state.get_expert_data_parallel_group()),
        ("embeddings", parallel_state.get_embedding_group(check_initialized=False)),
        ("model", parallel_state.get_model_parallel_group()),
    )
    return {group.group_name: name for name, group in groups if group is not None}
