"""Saving on schedule and continuing where the last complete checkpoint left off."""

from __future__ import annotations

import logging

from megatron_dcpo.checkpoints.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.distributed import broadcast_object
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
        save_checkpoint(
            run.checkpoints,
            step,
            run.policy,
            run.optimizer,
            run.scheduler,
            {"seed": run.config.seed, "steps": training.steps},
            training.keep_checkpoints,
        )
