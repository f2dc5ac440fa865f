"""Supervised training: the loop of ``dcpo sft``, on the policy, optimizer, schedule and checkpoints
of RL, without an engine.

    for step in range(done + 1, steps + 1):
        samples = run.draw(step)                   # of examples, their weights over the step's
        statistics = run.update(samples, step)     # forward and backward, one update
        run.checkpointer.save(step)
        run.records.log(step, statistics, run.validate(step))

An example is a demonstration: a :class:`TrainingSample` whose response nobody sampled and nobody
judged.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.checkpoints.saver import Saver
from megatron_dcpo.config.supervised_sections import SupervisedConfig, supervised_without_effect
from megatron_dcpo.data.datasets import PromptOptions, in_epochs
from megatron_dcpo.data.demonstrations import Demonstration, load_demonstrations
from megatron_dcpo.data.prompts import find_template
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.thinking import check_thinking
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.objectives.supervised_loss import SupervisedLoss, find_loss
from megatron_dcpo.policy.batching import sequence_length
from megatron_dcpo.policy.model import Policy, build_policy
from megatron_dcpo.policy.optimizer import Offload, Optimizer
from megatron_dcpo.rollout.tokens import check_vocabulary, load_tokenizer
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training import provenance
from megatron_dcpo.training.checkpointer import Checkpointer, Identity, MegatronModel
from megatron_dcpo.training.loggers import check_loggers
from megatron_dcpo.training.preflight import check_architecture, check_processes
from megatron_dcpo.training.progress import time_left
from megatron_dcpo.training.records import Records, why_refused
from megatron_dcpo.training.run import build_optimizer, build_saver, open_topology, start_watch
from megatron_dcpo.training.steps import train_steps
from megatron_dcpo.training.trainer import Trainer, UpdateStatistics
from megatron_dcpo.training.warnings import too_few
from megatron_dcpo.types import TrainingSample, replaced

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisedInputs:
    """What a run reads before anything is allocated: all of it has been checked. ``held_out`` is
    empty if nothing is measured.
    """

    loss: SupervisedLoss
    examples: Sequence[Demonstration]
    held_out: Sequence[Demonstration] = ()


@dataclass(frozen=True)
class SupervisedRun:
    """The parts of a supervised training on this rank. ``config`` has the number of steps that the
    examples make.
    """

    config: SupervisedConfig
    inputs: SupervisedInputs
    policy: Policy
    optimizer: Optimizer
    trainer: Trainer
    timers: Timers
    checkpointer: Checkpointer
    records: SupervisedRecords

    def draw(self, step: int) -> list[TrainingSample]:
        """Return the samples of a step, equal on all ranks. It is a function of seed and step
        alone, so that a resumed run goes on with the next ones.
        """
        data = self.config.data
        places = in_epochs(
            len(self.inputs.examples),
            first=(step - 1) * data.examples_per_step,
            count=data.examples_per_step,
            seed=self.config.seed,
            shuffle=data.shuffle,
        )
        return samples_of([self.inputs.examples[index] for _, index in places])

    def update(self, samples: Sequence[TrainingSample], step: int) -> UpdateStatistics:
        """Take one step of the optimizer on the samples. Collective."""
        statistics = UpdateStatistics(trained=list(samples))
        self.optimizer.zero_gradients()
        parts = self.trainer.backward(
            samples, self.inputs.loss, separable=self.inputs.loss.separable
        )
        self.trainer.take_step(parts, statistics, step)
        self.optimizer.gather_parameters()
        return statistics

    def validate(self, step: int) -> dict[str, float]:
        """Return ``evaluation/loss`` of the policy after ``step``, if it is due: the mean loss of
        the held-out examples. Collective.
        """
        interval = self.config.evaluation.interval
        is_last = step == self.config.training.steps
        if not interval or not (step % interval == 0 or is_last):
            return {}
        held_out = self.inputs.held_out
        total = 0.0
        rows = logprobs_of(self.trainer, held_out, at_once=self.config.data.examples_per_step)
        for example, logprobs in zip(held_out, rows, strict=True):
            total += example.loss(logprobs)
        return {"evaluation/loss": total / sum(example.weight for example in held_out)}


def logprobs_of(
    trainer: Trainer, examples: Sequence[Demonstration], at_once: int
) -> list[np.ndarray]:
    """Return the log-probs of every example's response under the trainer's policy, on all ranks;
    ``at_once`` examples go through the schedule together. Collective.
    """
    found: list[np.ndarray] = []
    for start in range(0, len(examples), at_once):
        samples = [each.sample() for each in examples[start : start + at_once]]
        here = trainer.logprobs(trainer.policy, samples)
        rows: dict[int, np.ndarray] = {}
        for rows_of_rank in trainer.collectives.gather(here):
            rows |= rows_of_rank
        found += [rows[index] for index in range(len(samples))]
    return found


class SupervisedRecords(Records):
    """``metrics.jsonl`` of a supervised training."""

    def __init__(
        self, config: SupervisedConfig, topology: Topology, timers: Timers, saver: Saver
    ) -> None:
        super().__init__(
            directory=Path(config.run_dir), config=config, topology=topology, saver=saver
        )
        self.timers = timers

    def log(self, step: int, statistics: UpdateStatistics, measured: Mapping[str, float]) -> None:
        """Record one step and clear the timers. Collective. Raises as
        :meth:`megatron_dcpo.training.recorder.Recorder.log`.
        """
        refused: str | None = None
        if self.writes:
            row = {**self._row(step, statistics), **measured}
            try:
                self.append(self.metrics_path, row)
                self.to_loggers(step, row)
            except OSError as error:
                refused = why_refused(error)
            self.rows.append(row)
            self._show(step, row)
        self.timers.clear()
        self.end_if(refused, step)

    def log_start(self, measured: Mapping[str, float]) -> None:
        """Record the validation before the first step, if there is one. Collective."""
        refused: str | None = None
        if self.writes and measured:
            logger.info("before training: held out %.4f", measured["evaluation/loss"])
            try:
                self.append(self.metrics_path, {"step": 0, **measured})
                self.to_loggers(0, measured)
            except OSError as error:
                refused = why_refused(error)
        self.end_if(refused, step=0)

    def _row(self, step: int, statistics: UpdateStatistics) -> dict[str, float]:
        """Return the metrics of a step. ``loss`` is NaN if the update was skipped."""
        tokens = sum(map(sequence_length, statistics.trained))
        trained = 0
        for sample in statistics.trained:
            assert sample.weights is not None
            trained += int(np.count_nonzero(sample.weights))
        seconds = self.timers.seconds
        return {
            "step": step,
            "loss": _only(statistics.losses),
            "grad_norm/total": _only(statistics.grad_norms),
            "learning_rate": statistics.learning_rate,
            "updates/skipped": statistics.skipped,
            "tokens/step": tokens,
            "tokens/trained": trained,
            "tokens/s/train": tokens / max(seconds.get("train", 0.0), 1e-9),
            **{f"time/{phase}": value for phase, value in seconds.items()},
            "time/step": sum(seconds.values()),
        }

    def _show(self, step: int, row: Mapping[str, float]) -> None:
        line = f"loss {row['loss']:.4f}"
        if "evaluation/loss" in row:
            line += f"  held out {row['evaluation/loss']:.4f}"
        self.progress.show(
            step,
            line=line,
            speed=f"{row['tokens/s/train']:,.0f} tokens/s",
            details=f"{row['time/step']:.2f} s",
            note=time_left(self.rows, self.progress.steps - step),
        )


def _only(values: Sequence[float]) -> float:
    return values[0] if values else math.nan


def samples_of(examples: Sequence[Demonstration]) -> list[TrainingSample]:
    """Return the samples of a step's examples. The weights of their tokens are divided by the sum
    of the examples' weights, so that the sum of the contributions is the mean loss.
    """
    total = sum(example.weight for example in examples)
    samples = []
    for example in examples:
        samples.append(replaced(example.sample(), weights=example.weights / total))
    return samples


def fingerprint_of(examples: Sequence[Demonstration]) -> str:
    """Return a short name of what is trained on: equal if a resumed run would train on the same."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(example.digest())
    return digest.hexdigest()[:16]


# --------------------------------------------------------------------------------------- the loop
def fine_tune(config: SupervisedConfig) -> None:
    """Train as ``config`` says; collective over all processes of ``torchrun``.

    Leaves ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, TensorBoard events and the trained
    policy as a Hugging Face directory ``policy/`` in ``run_dir``, and an adapter in ``adapter/``.
    Raises :class:`UserError` on bad input, and :class:`Stopped` after a signal, when everything
    done is saved.
    """
    config = provenance.with_model_here(config)
    with build(config, read_inputs(config)) as run:
        train_steps(
            run,
            without_effect=supervised_without_effect(config),  # before steps come from epochs
            start=partial(_start, run),
            step=partial(train_step, run),
        )


def train_step(run: SupervisedRun, step: int) -> None:
    """Draw, update, save, validate, record. Collective."""
    with run.timers("train"), run.checkpointer.completing():
        statistics = run.update(run.draw(step), step)
    with run.timers("save"):
        run.checkpointer.save(step)
    with run.timers("evaluate"):
        measured = run.validate(step)
    run.records.log(step, statistics, measured)
    with run.timers("save"):
        run.checkpointer.announce(step)  # now that the records of the step are written


def _start(run: SupervisedRun, done: int) -> None:
    """Say what follows, and measure the policy before the first step."""
    steps = run.config.training.steps
    if run.policy.topology.rank == 0:
        logger.info(
            "%d examples, %d steps of %d; %s",
            len(run.inputs.examples),
            steps,
            run.config.data.examples_per_step,
            f"step {done + 1} begins" if done < steps else "already done",
        )
    if done == 0:
        run.records.log_start(run.validate(0))
    run.timers.clear()


# ------------------------------------------------------------------------------------- the parts
@contextmanager
def build(config: SupervisedConfig, inputs: SupervisedInputs) -> Iterator[SupervisedRun]:
    """Open a run: build all parts. Collective.

    Raises :class:`UserError` on bad input.
    """
    config = with_steps(config, len(inputs.examples))
    topology = open_topology(config)
    fingerprint = fingerprint_of(inputs.examples)
    if len(set(distributed.all_gather_objects(fingerprint))) > 1:
        raise UserError(
            "the ranks have read different examples: data.path, data.template or the date "
            "has changed while they started; start the run again"
        )
    directory = Path(config.run_dir)
    watch = start_watch(directory, topology)
    timers = Timers(watch)
    policy = build_policy(config.model, config.parallel, topology, training=not config.frozen)
    optimizer = build_optimizer(config, policy)
    # There is no engine, and the device is the policy's from here on.
    Offload(policy, optimizer.megatron, wanted=False).reload()
    trainer = Trainer(
        policy=policy, optimizer=optimizer, parallel=config.parallel, training=config.training
    )
    saver = build_saver(config, topology)
    checkpointer = Checkpointer(
        saver=saver,
        model=MegatronModel(policy, optimizer),
        parts={"trainer": trainer},
        identity=Identity(
            seed=config.seed,
            data={
                "examples_per_step": config.data.examples_per_step,
                "shuffle": config.data.shuffle,
            },
            fingerprint=fingerprint,
        ),
        on_device=nullcontext,
        topology=topology,
        training=config.training,
    )
    records = SupervisedRecords(config, topology, timers, saver)
    records.counts = {config.data.path: len(inputs.examples)}
    run = SupervisedRun(
        config=config,
        inputs=inputs,
        policy=policy,
        optimizer=optimizer,
        trainer=trainer,
        timers=timers,
        checkpointer=checkpointer,
        records=records,
    )
    with watch:
        yield run


def with_steps(config: SupervisedConfig, examples: int) -> SupervisedConfig:
    """Return the configuration with its number of steps: ``training.steps``, or what so many
    examples make in all epochs. The last step may begin another epoch, to be full.
    """
    in_all_epochs = config.training.epochs * examples
    steps = config.training.steps or math.ceil(in_all_epochs / config.data.examples_per_step)
    training = dataclasses.replace(config.training, steps=steps)
    return dataclasses.replace(config, training=training)


def read_inputs(config: SupervisedConfig) -> SupervisedInputs:
    """Read and check model, tokenizer, loss and demonstrations, the cheap checks first. Raises
    :class:`UserError`.
    """
    loss = find_loss(config.objective.name)
    tokenizer, arch = read_model(config)
    held_out: list[Demonstration] = []
    if config.evaluation.path:
        held_out = _load(config, config.evaluation.path, tokenizer, arch, limit=0)
    examples = _load(config, config.data.path, tokenizer, arch, limit=config.data.limit)
    trained = {example.prompt.token_ids for example in examples}
    count = sum(example.prompt.token_ids in trained for example in held_out)
    if count:
        logger.warning(
            "%s: held-out demonstrations whose prompt is in the training data: %d of %d",
            config.evaluation.path,
            count,
            len(held_out),
        )
    per_step = config.data.examples_per_step
    warning = too_few(len(examples), "demonstrations", "data.examples_per_step", per_step)
    if warning:
        logger.warning("%s: %s", config.data.path, warning)
    return SupervisedInputs(loss=loss, examples=examples, held_out=held_out)


def read_model(config: SupervisedConfig) -> tuple[PreTrainedTokenizerBase, Architecture]:
    """Return the tokenizer and the architecture of the model, checked against the configuration.
    Raises :class:`UserError`.
    """
    find_template(config.data.template)
    arch = check_architecture(config)
    check_processes(config, int(os.environ.get("WORLD_SIZE", "1")))
    check_loggers(config)
    tokenizer = load_tokenizer(config.model.path)
    vocabulary = token_bytes(tokenizer)
    check_thinking(config.data.thinking, vocabulary.thinking, config.model.path)
    check_vocabulary(config.model.path, vocabulary, arch.vocab_size)
    return tokenizer, arch


def _load(
    config: SupervisedConfig,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    arch: Architecture,
    *,
    limit: int,
) -> list[Demonstration]:
    data = config.data
    options = PromptOptions(
        template=data.template,
        thinking=data.thinking,
        limit=limit,
        date=provenance.date_of(config),
    )
    return load_demonstrations(
        path,
        tokenizer,
        options,
        max_length=min(data.max_length, arch.max_position_embeddings),
        reading=RowOptions(columns=data.columns, row=data.row, unread=data.unread),
    )
