"""Saving on schedule, stopping in good order, and continuing where the last intact checkpoint left off."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from typing import Any

from megatron_dcpo.checkpoints.manifest import iteration_dir, latest_iteration
from megatron_dcpo.checkpoints.saver import remove_leftovers
from megatron_dcpo.checkpoints.state import checkpoint_state, load_checkpoint, newest_intact
from megatron_dcpo.data.datasets import draw_prompts
from megatron_dcpo.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Stopped, UserError, one_line
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.distributed import broadcast_object, max_over_ranks
from megatron_dcpo.training.groups import restored_groups, saved_groups
from megatron_dcpo.training.run import TrainingRun
from megatron_dcpo.types import Prompt

logger = logging.getLogger(__name__)


def resume(run: TrainingRun) -> int:
    """The number of steps already done: 0 for a fresh run, else restored from the newest intact checkpoint. Collective.

    ``training.resume=none`` refuses to overwrite a run that has checkpoints.
    """
    announced = broadcast_object(latest_iteration(run.checkpoints))
    if announced is not None and run.config.training.resume == "none":
        raise UserError(
            f"{run.directory} already holds a checkpoint of step {announced}; pass --resume auto to continue it, "
            "or another run_dir to start anew"
        )
    latest, damaged = newest_intact(run.checkpoints, run.topology)
    if latest is None:
        return 0
    for iteration, why in damaged.items():
        run.saver.damaged.add(iteration)
        if run.topology.rank == 0:
            logger.warning("checkpoint %s is damaged: %s", iteration_dir(run.checkpoints, iteration), why)
    run.engine.sleep()  # the moments come into being
    with run.offload.on_device():
        saved = load_checkpoint(run.checkpoints, latest, run.policy, run.optimizer, run.scheduler, run.adapter)
    try:
        _check_same_run(run, saved)
        run.progress.nonfinite_in_a_row = int(saved["reward"]["nonfinite_in_a_row"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:  # the last: a tensor where a number should be
        path = iteration_dir(run.checkpoints, latest)
        raise UserError(f"checkpoint {path} cannot be read ({type(error).__name__}: {one_line(error, 200)})") from None
    run.progress.saved_step = latest
    if run.topology.rank == 0:
        remove_leftovers(run.checkpoints)
        logger.info("continuing %s after step %d", run.directory, latest)
    return latest


def begin_save(run: TrainingRun, step: int) -> None:
    """Checkpoint after ``step`` when the schedule says so, and always after the last one. Collective.

    The engine sleeps: a save needs no memory of the device, but nothing else shall need it meanwhile. ``finish_save``
    announces the checkpoint, once the records of the step are written.
    """
    training = run.config.training
    due = training.save_interval and step % training.save_interval == 0
    if due or step == training.steps:
        _begin(run, step)


def save_now(run: TrainingRun, step: int) -> None:
    """Checkpoint after ``step``, where the schedule has not. The engine sleeps afterwards. Collective."""
    if run.progress.saved_step != step:
        run.engine.sleep()
        _begin(run, step)


def finish_save(run: TrainingRun, step: int) -> None:
    """Announce the checkpoint that is written; wait for it after the last step. Collective."""
    if step == run.config.training.steps:
        run.saver.wait()
    else:
        run.saver.finish()


def stop_if_asked(run: TrainingRun, done: int) -> None:
    """Has a signal reached any rank? Then checkpoint after the ``done`` steps and raise :class:`Stopped`. Collective.

    Called where the policy is that of a whole number of steps: after a rollout, which a signal cuts short, and after a
    step. A run that has done all its steps goes on to its end.
    """
    number = max_over_ranks(signals.stop_requested() or 0)
    if not number or done == run.config.training.steps:
        return
    if done:
        save_now(run, done)
    run.saver.wait()
    signals.ignore_signals()
    raise Stopped(
        f"stopped by {signals.name_of(number)} after step {done} of {run.config.training.steps}"
        f"{', saved' if done else ', nothing to save yet'}; --resume auto continues {run.directory}",
        EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE,
    )


def _begin(run: TrainingRun, step: int) -> None:
    with run.offload.on_device():
        state = checkpoint_state(run.policy, run.optimizer, run.scheduler, step, _run_state(run, step), run.adapter)
        run.saver.begin(step, state)
    run.progress.saved_step = step


def _run_state(run: TrainingRun, step: int) -> dict[str, Any]:
    """What continues a run beside model and optimizer."""
    return {
        "seed": run.config.seed,
        "data": {
            "consumed_prompts": step * run.config.data.prompts_per_step + run.progress.extra_prompts,
            "prompts_per_step": run.config.data.prompts_per_step,
            "shuffle": run.config.data.shuffle,
            "fingerprint": run.data_fingerprint,
        },
        "reward": {"nonfinite_in_a_row": run.progress.nonfinite_in_a_row},
        "engine": {"weights_version": step},  # what it has, or is about to get
        "rollout": {"carried": saved_groups(run.progress.carried)},
    }


def _check_same_run(run: TrainingRun, saved: dict[str, Any]) -> None:
    """Seed and data must be those of the checkpoint: otherwise the run would be another one from here on. The prompts go
    on behind the last one consumed."""
    now = _run_state(run, saved["iteration"])
    for name, found, kept in (
        ("seed", now["seed"], saved["seed"]),
        *((f"data.{key}", now["data"][key], saved["data"][key]) for key in ("prompts_per_step", "shuffle")),
    ):
        if found != kept:
            raise UserError(f"{run.directory} was started with {name}={kept}, not {found}; keep it to resume")
    if now["data"]["fingerprint"] != saved["data"]["fingerprint"]:
        raise UserError(
            f"{run.config.data.path} no longer holds the prompts that {run.directory} was started with (or they are "
            "formatted differently); restore them to resume, or start another run_dir"
        )
    cursor, version = saved["data"]["consumed_prompts"], saved["engine"]["weights_version"]
    run.progress.extra_prompts = int(cursor) - now["data"]["consumed_prompts"]
    if run.progress.extra_prompts < 0 or version != saved["iteration"]:
        raise UserError(
            f"the checkpoint of step {saved['iteration']} in {run.directory} contradicts itself: {cursor} prompts "
            f"consumed, engine at version {version}"
        )
    _restore_carried(run, saved.get("rollout", {"carried": []})["carried"], saved["iteration"])


def _restore_carried(run: TrainingRun, saved: Sequence[Any], done: int) -> None:
    config, data = run.config.rollout, run.config.data

    def draw(position: int) -> Prompt:
        return draw_prompts(run.prompts, position, 1, seed=run.config.seed, shuffle=data.shuffle)[0]

    run.progress.carried = restored_groups(saved, draw, config.group_size)
    responses = [response for group in run.progress.carried for response, _ in group.responses.values()]
    oldest, longest = (max(values, default=0) for values in (
        [done - response.oldest_version for response in responses],
        [len(response.token_ids) for response in responses if response.finish_reason == "abort"],
    ))  # fmt: skip
    if oldest > config.max_staleness:
        raise UserError(
            f"the checkpoint of step {done} carries responses that the next step continues; set rollout.max_staleness="
            f"{oldest} or more to resume"
        )
    if longest >= config.max_response_length:
        raise UserError(
            f"the checkpoint of step {done} carries an unfinished response of {longest} tokens; set "
            f"rollout.max_response_length above that to resume"
        )
