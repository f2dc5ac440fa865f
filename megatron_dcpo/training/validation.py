"""Validation while training: held-out problems, sampled by the run's engines with the weights of a step.

The run stays as it is, bit for bit: random numbers are counted, an engine forgets the prompts, nothing is trained. What was
measured is in ``metrics.jsonl``, from where a resumed run has it; the best checkpoint and an early stop follow from it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from megatron_dcpo.checkpoints.manifest import iterations
from megatron_dcpo.evaluation.heldout import HeldOut, improves, value_of
from megatron_dcpo.evaluation.samples import Sample, write_samples
from megatron_dcpo.rollout import SamplingConfig
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.distributed import all_gather_objects, broadcast_object, max_over_ranks
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.recorder import logged_rows
from megatron_dcpo.training.recovery import save_now
from megatron_dcpo.training.run import TrainingRun
from megatron_dcpo.training.sampling import Rollout, engines_of, generate
from megatron_dcpo.training.weight_sync import synchronise_engine
from megatron_dcpo.types import Response

logger = logging.getLogger(__name__)


def validate(run: TrainingRun, step: int, timers: Timers) -> dict[str, float]:
    """``evaluation/BENCHMARK/METRIC`` of the policy after ``step``, which the engines have; nothing where that is not due,
    is known, or was cut short by a signal. Collective."""
    if run.held_out is None or not _due(run, step) or step in run.progress.evaluations:
        return {}
    with timers("evaluation"):
        responses = _sample(run, run.held_out, step)
        if max_over_ranks(signals.stop_requested() or 0):
            return {}
        own = run.held_out.judged(responses, run.engine.eos_token_ids)
        samples = [sample for part in all_gather_objects(own) for sample in part]
        measured = broadcast_object(run.held_out.metrics(samples))
        _write(run, step, samples)
    run.progress.evaluations[step] = measured
    _note_best(run, step)
    return measured


def restore(run: TrainingRun, done: int) -> None:
    """What a resumed run has measured up to the step ``done``, and which checkpoint is the best. Collective."""
    found: dict[int, dict[str, float]] = {}
    for row in logged_rows(run.directory / "metrics.jsonl") if run.topology.rank == 0 else ():
        measured = {k: np.nan if v is None else float(v) for k, v in row.items() if k.startswith("evaluation/")}
        if measured and row["step"] <= done:
            found[row["step"]] = measured
    run.progress.evaluations, present = broadcast_object((found, iterations(run.checkpoints)))
    for step in present:
        if step in run.progress.evaluations and step not in run.saver.damaged:
            _note_best(run, step)


def save_best(run: TrainingRun, step: int) -> None:
    """Checkpoint after ``step`` where that is the best so far and the schedule has saved none. Collective."""
    if run.progress.best_step == step and run.progress.saved_step != step:
        save_now(run, step)
        synchronise_engine(run, version=step)


def stop_early(run: TrainingRun, done: int) -> bool:
    """Whether ``training.early_stop`` ends the run after ``done`` steps; its checkpoint is then complete. Collective."""
    rule, evaluations = run.config.training.early_stop, run.progress.evaluations
    if rule is None or done == run.config.training.steps:
        return False
    best, since = None, 0
    for step in sorted(evaluations.keys() - {0}):
        if improves(rule.metric, evaluations[step], evaluations[best] if best else None):
            best, since = step, 0
        else:
            since += 1
    if since < rule.patience:
        return False
    save_now(run, done)
    run.saver.wait()
    if run.topology.rank == 0:
        than = f"{value_of(evaluations[best], rule.metric):.4g} after step {best}" if best else "an undefined value"
        logger.info(
            "stopped early after step %d, saved: %s is not better than %s in %d validations (training.early_stop)",
            *(done, rule.metric, than, since),
        )
    return True


def _due(run: TrainingRun, step: int) -> bool:
    options = run.config.evaluation
    return options.at_start if step == 0 else step % options.interval == 0 or step == run.config.training.steps


def _note_best(run: TrainingRun, step: int) -> None:
    """Of the steps that have, or get, a checkpoint."""
    word, evaluations, before = run.config.training.keep_best, run.progress.evaluations, run.progress.best_step
    if word and step and improves(word, evaluations[step], evaluations[before] if before is not None else None):
        run.progress.best_step = step
        run.saver.best = {"iteration": step, "metric": word, "value": value_of(evaluations[step], word)}


def _sample(run: TrainingRun, held_out: HeldOut, step: int) -> list[Response]:
    """This rank's share of the responses. Collective."""
    options = run.config.evaluation
    sampling = SamplingConfig(
        n=options.samples,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=options.max_tokens or run.config.rollout.max_response_length,
        seed=options.seed,
    )
    size, engine, engines = engines_of(run)
    samples = [(p, n) for p in list(held_out.prompts.values())[engine::engines] for n in range(options.samples)]
    rollout = Rollout()
    generate(run, samples, sampling, 0, step, rollout, lambda responses: None)
    run.engine.forget_prompts()
    share = samples[run.topology.rank % size :: size]
    return [r for p, n in share if (r := rollout.responses.get((p.prompt_id, n))) is not None]


def _write(run: TrainingRun, step: int, samples: Sequence[Sample]) -> None:
    """``evaluation/step_000010.jsonl``, which ``dcpo evaluate --samples`` reads."""
    if run.topology.rank:
        return
    path = run.directory / "evaluation" / f"step_{step:06d}.jsonl"
    try:
        path.parent.mkdir(exist_ok=True)
        write_samples(samples, path)
    except OSError as refused:  # where the disk is full the records of the step end the run, on all ranks
        logger.warning("cannot write %s (%s)", path, refused.strerror)
