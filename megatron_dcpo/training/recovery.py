"""Saving on schedule and continuing where the last complete checkpoint left off."""

from __future__ import annotations

import logging
import signal

from megatron_dcpo import signals
from megatron_dcpo.checkpoints.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from megatron_dcpo.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Stopped, UserError
from megatron_dcpo.runtime.distributed import broadcast_object, max_over_ranks
from megatron_dcpo.training.setup import Run

logger = logging.getLogger(__name__)


def resume(run: Run) -> int:
    """The number of steps already done: 0 for a fresh run, else restored from the latest checkpoint. Collective.

    ``training.resume=none`` refuses to overwrite a run that has checkpoints.
    """
    latest = broadcast_object(latest_iteration(run.checkpoints))
    if latest is None:
        return 0
    if run.config.training.resume == "none":
        raise UserError(
            f"{run.directory} already holds a checkpoint of step {latest}; pass --resume auto to continue it, "
            "or another run_dir to start anew"
        )
    extra = load_checkpoint(run.checkpoints, latest, run.policy, run.optimizer, run.scheduler)
    if extra["seed"] != run.config.seed:
        raise UserError(
            f"{run.directory} was started with seed={extra['seed']}, not {run.config.seed}; keep the seed to resume"
        )
    if run.topology.rank == 0:
        logger.info("continuing %s after step %d", run.directory, latest)
    return latest


def save(run: Run, step: int) -> None:
    """Checkpoint after ``step`` when the schedule says so, and always after the last one. Collective."""
    training = run.config.training
    due = training.save_interval and step % training.save_interval == 0
    if due or step == training.steps:
        _save(run, step)


def stop_if_asked(run: Run, done: int) -> None:
    """Has a signal reached any rank? Then checkpoint after the ``done`` steps and raise :class:`Stopped`. Collective.

    Called where the policy is that of a whole number of steps: after a rollout, which a signal cuts short, and after a
    step. A run that has done all its steps goes on to its end.
    """
    number = max_over_ranks(signals.stop_requested() or 0)
    if not number or done == run.config.training.steps:
        return
    if done and broadcast_object(latest_iteration(run.checkpoints)) != done:
        _save(run, done)
    signals.ignore_from_now_on()
    interrupted = number == signal.SIGINT
    raise Stopped(
        f"stopped by {signals.name_of(number)} after step {done} of {run.config.training.steps}"
        f"{', saved' if done else ', nothing to save yet'}; --resume auto continues {run.directory}",
        EXIT_INTERRUPTED if interrupted else EXIT_REQUEUE,
    )


def _save(run: Run, step: int) -> None:
    with run.offload.at_home():
        save_checkpoint(
            run.checkpoints,
            step,
            run.policy,
            run.optimizer,
            run.scheduler,
            {"seed": run.config.seed, "steps": run.config.training.steps},
            run.config.training.keep_checkpoints,
        )
