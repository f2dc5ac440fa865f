"""The training loop, which reads as the method: generate and judge, score and update, hand the new
weights to the engine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from megatron_dcpo.config import Config
from megatron_dcpo.config.without_effect import options_without_effect
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.verdicts import TooManyUnjudged
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.runtime.device import profile
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.text import counted
from megatron_dcpo.training import provenance
from megatron_dcpo.training.run import Run, build
from megatron_dcpo.training.sampler import Batch
from megatron_dcpo.training.steps import train_steps
from megatron_dcpo.weights.table import number_of_parameters

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_RESTARTS = 2  # of the engines, within one rollout or one push of weights


def train(config: Config) -> None:
    """Train as ``config`` says; collective over all processes of ``torchrun``.

    Leaves ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``samples/``, ``evaluation/``,
    TensorBoard events and the trained policy as a Hugging Face directory ``policy/`` in
    ``run_dir``. Raises :class:`UserError` on bad input, and :class:`Stopped` after a signal, when
    everything done is saved.
    """
    config = provenance.with_model_here(config)
    with build(config) as run:
        train_steps(
            run,
            without_effect=options_without_effect(config),
            start=partial(_start, run),
            step=partial(_traced_step, run),
            is_over=partial(_stops_early, run),
        )


def train_step(run: Run, step: int) -> None:
    """Generate, judge, update, synchronize, record. Collective."""
    batch = _take_batch(run, step)
    run.rollouts.start(step + 1)  # if a batch is generated ahead, alongside the training
    with run.timers("train"), run.checkpointer.completing():
        run.engine.sleep()
        run.offload.reload()
        samples, statistics = run.updater.update(
            samples=batch.samples,
            scores=batch.scores,
            step=step,
            shown=run.recorder.samples_shown(step),
        )
    with run.timers("save"):  # while the engine sleeps
        run.checkpointer.save(step)
    with run.timers("reshard"):
        run.offload.offload()
        traffic = push_weights(run, version=step)
    validated = _validate(run, step)
    run.recorder.log(step, samples, statistics, traffic | batch.metrics | validated)
    with run.timers("save"):
        _save_best(run, step)
        run.checkpointer.announce(step)  # now that the records of the step are written


def _take_batch(run: Run, step: int) -> Batch:
    try:
        return with_restarts(run, partial(run.rollouts.take, step), version=step - 1)
    except RolloutAbandoned:  # by a signal
        run.checkpointer.stop_if_asked(done=step - 1)
        raise
    except TooManyUnjudged as failed:
        run.checkpointer.save_and_end(failed, done=step - 1)


# ------------------------------------------------------------------------------- failed engines
def with_restarts(run: Run, sample: Callable[[], T], version: int) -> T:
    """Return what ``sample`` returns. When an engine fails, all are started again with the weights
    ``version``, and it is called again: random numbers are counted, so that the result is the same.
    Collective. Raises :class:`UserError` when an engine fails repeatedly.

    All engines together: when vLLM measures the memory that is left, it waits for every rank.
    """
    for restarts in itertools.count():
        try:
            return sample()
        except EngineError as failure:
            _restart_engines(run, failure, restarts, "a rollout")
            push_weights(run, version)
    raise AssertionError("unreachable: the last failure raises")


def push_weights(run: Run, version: int) -> dict[str, float]:
    """Push the policy's weights into the engines (:meth:`WeightSync.push`); engines that fail are
    started again. Collective. Raises :class:`UserError` when an engine fails repeatedly.
    """
    for restarts in itertools.count():
        try:
            return run.weight_sync.push(version)
        except EngineError as failure:
            _restart_engines(run, failure, restarts, f"the weights of step {version}")
    raise AssertionError("unreachable: the last failure raises")


def _restart_engines(run: Run, failure: EngineError, restarts: int, what: str) -> None:
    if restarts == MAX_RESTARTS:
        raise UserError(f"an engine failed {restarts + 1} times with {what}: {failure}")
    if run.policy.topology.rank == 0:
        logger.warning("%s; every engine is restarted and %s is repeated", failure, what)
    run.engine.restart()


# ------------------------------------------------------------------------------- beginning
def _start(run: Run, done: int) -> None:
    """Give the engines the policy after ``done`` steps, and validate it. The first rank says so: a
    large model takes minutes before its first step is logged.
    """
    config = run.config
    is_first_rank = run.policy.topology.rank == 0
    _restore_validations(run, done)
    if is_first_rank:
        logger.info(
            "%s parameters, sampled by %s; handing over the weights",
            counted(number_of_parameters(run.policy.arch)),
            type(run.engine).__name__,
        )
    run.weight_sync.check_plan()
    push_weights(run, version=done)
    run.recorder.log_evaluation(done, _validate(run, done))
    run.timers.clear()
    if is_first_rank:
        logger.info(what_follows(config, done))


def what_follows(config: Config, done: int) -> str:
    """Return what follows after ``done`` steps: the next one, or the end of a finished run."""
    steps = config.training.steps
    if done >= steps:
        return (
            f"{config.run_dir} is already done: {done} steps trained, training.steps={steps}; "
            f"to train on, raise it, for instance training.steps={2 * done}"
        )
    responses = config.data.prompts_per_step * config.rollout.group_size
    return (
        f"step {done + 1} begins: {responses} responses of at most "
        f"{config.rollout.max_response_length} tokens"
    )


# -------------------------------------------------------------------------------- validation
def _validate(run: Run, step: int) -> dict[str, float]:
    """Return ``evaluation/BENCHMARK/METRIC`` of the policy after ``step``, which the engines have;
    nothing when validation is not due, is known from before a resumption, or was cut short.
    """
    validator = run.validator
    if validator is None or not validator.is_due(step) or step in run.selection.measured:
        return {}
    run.rollouts.wait_for_engine()
    validation = with_restarts(run, validator.validate, version=step)
    if validation is None:
        return {}
    run.recorder.write_validation(step, validation.write)
    is_best = run.selection.add(step, validation.metrics)
    if is_best:
        run.checkpointer.keep(step, run.selection.metric, run.selection.value(step))
    return validation.metrics


def _save_best(run: Run, step: int) -> None:
    """Checkpoint after ``step`` when its validation is the best so far and the schedule has saved
    none.
    """
    if run.selection.best_step == step and run.checkpointer.saved_step != step:
        run.checkpointer.save_now(step)
        push_weights(run, version=step)


def _restore_validations(run: Run, done: int) -> None:
    """Take over what a resumed run has measured up to the step ``done``."""
    if run.validator is None:
        return
    selection = run.selection
    measured = run.recorder.logged_validations(done)
    best = run.checkpointer.recorded_best()
    # the validation of the step after which the run resumes is made again if it is lost
    if best is not None and best["iteration"] < done:
        selection.recall(best["iteration"], best["metric"], best["value"], measured)
    selection.restore(measured, saved=run.checkpointer.intact_steps())
    if selection.best_step is not None:
        value = selection.value(selection.best_step)
        run.checkpointer.keep(selection.best_step, selection.metric, value)


def _stops_early(run: Run, done: int) -> bool:
    """Return whether ``training.early_stop`` ends the run after ``done`` steps; its checkpoint is
    then complete.
    """
    selection = run.selection
    if done == run.config.training.steps or not selection.is_exhausted():
        return False
    run.checkpointer.save_now(done)
    run.checkpointer.saver.wait()
    if run.policy.topology.rank == 0:
        stagnant, best = selection.stagnation()
        before = "an undefined value"
        if best is not None:
            before = f"{selection.value(best):.4g} after step {best}"
        logger.info(
            "stopped early after step %d, saved: %s is not better than %s in %d validations "
            "(training.early_stop)",
            done,
            selection.metric,
            before,
            stagnant,
        )
    return True


def _traced_step(run: Run, step: int) -> None:
    with _traced(run, step):
        train_step(run, step)


def _traced(run: Run, step: int) -> AbstractContextManager[None]:
    """Return a profiler around the steps of ``training.profile_steps``, on the first rank."""
    if step not in run.config.training.profile_steps or run.policy.topology.rank != 0:
        return nullcontext()
    return profile(run.directory / "profile" / f"step_{step:06d}.json.gz")
