"""Saving on schedule, stopping in good order, and continuing where the last intact checkpoint left
off.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron_dcpo.checkpoints.manifest import iteration_dir, latest_iteration
from megatron_dcpo.checkpoints.saver import Saver, remove_leftovers
from megatron_dcpo.checkpoints.state import (
    Optimizer,
    checkpoint_state,
    load_checkpoint,
    newest_intact,
)
from megatron_dcpo.config import TrainingConfig
from megatron_dcpo.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Stopped, UserError, one_line
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import Offload
from megatron_dcpo.rollout import Engine
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.distributed import broadcast_object, max_over_ranks
from megatron_dcpo.training.groups import restored_groups, saved_groups
from megatron_dcpo.training.sampler import Sampler
from megatron_dcpo.training.updater import Updater

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves a run to ``directory/checkpoints`` and restores it. The engine sleeps while it works.
    All methods are collective. ``identity``: what must be the same to resume, by option, and the
    fingerprint of the ``data``. ``saved_step``: of the last checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        saver: Saver,
        policy: Policy,
        optimizer: Optimizer,
        offload: Offload,
        engine: Engine,
        sampler: Sampler,
        updater: Updater,
        training: TrainingConfig,
        identity: Mapping[str, Any],
    ) -> None:
        self.directory, self.saver = directory, saver
        self.policy, self.optimizer, self.offload, self.engine = policy, optimizer, offload, engine
        self.sampler, self.updater, self.training, self.identity = (
            sampler,
            updater,
            training,
            identity,
        )
        self.saved_step = 0

    def resume(self) -> int:
        """Restore the newest intact checkpoint; return the number of steps already done, 0 for a
        fresh run.

        ``training.resume=none`` refuses to overwrite a run that has checkpoints. Raises
        :class:`UserError`.
        """
        checkpoints, topology = self.saver.directory, self.policy.topology
        announced = broadcast_object(latest_iteration(checkpoints))
        if announced is not None and self.training.resume == "none":
            raise UserError(
                f"{self.directory} already holds a checkpoint of step {announced}; pass --resume "
                "auto to continue it, "
                "or another run_dir to start anew"
            )
        latest, damaged = newest_intact(checkpoints, topology)
        if latest is None:
            return 0
        for iteration, why in damaged.items():
            self.saver.damaged.add(iteration)
            if topology.rank == 0:
                logger.warning(
                    "checkpoint %s is damaged: %s", iteration_dir(checkpoints, iteration), why
                )
        self.engine.sleep()  # the moments come into being
        with self.offload.on_device():
            saved = load_checkpoint(checkpoints, latest, self.policy, self.optimizer)
        try:
            self._restore(saved)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            # the last: a tensor where a number should be
            path = iteration_dir(checkpoints, latest)
            raise UserError(
                f"checkpoint {path} cannot be read ({type(error).__name__}: {one_line(error, 200)})"
            ) from None
        self.saved_step = latest
        if topology.rank == 0:
            remove_leftovers(checkpoints)
            logger.info("continuing %s after step %d", self.directory, latest)
        return latest

    def save(self, step: int) -> None:
        """Begin a checkpoint after ``step`` when the schedule says so, and always after the last
        one.

        A save needs no memory of the device, but nothing else shall need it meanwhile.
        :meth:`announce` makes it the latest, once the records of the step are written.
        """
        interval = self.training.save_interval
        if (interval and step % interval == 0) or step == self.training.steps:
            self._begin(step)

    def save_now(self, step: int) -> None:
        """Begin a checkpoint after ``step``, where the schedule has not. The engine sleeps
        afterwards.
        """
        if self.saved_step != step:
            self.engine.sleep()
            self._begin(step)

    def announce(self, step: int) -> None:
        """Make the checkpoint that is written the latest; wait for it after the last step."""
        if step == self.training.steps:
            self.saver.wait()
        else:
            self.saver.finish()

    def stop_if_asked(self, done: int) -> None:
        """Checkpoint after the ``done`` steps and raise :class:`Stopped` when a signal has reached
        any rank.

        Called where the policy is that of a whole number of steps: after a rollout, which a signal
        cuts short, and after a step. A run that has done all its steps goes on to its end.
        """
        number = max_over_ranks(signals.stop_requested() or 0)
        if not number or done == self.training.steps:
            return
        if done:
            self.save_now(done)
        self.saver.wait()
        signals.ignore_signals()
        raise Stopped(
            f"stopped by {signals.name_of(number)} after step {done} of {self.training.steps}"
            f"{', saved' if done else ', nothing to save yet'}; --resume auto continues "
            f"{self.directory}",
            EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE,
        )

    def stop_if_warned(self, warned: Sequence[str], done: int) -> None:
        """Checkpoint and raise :class:`UserError` where the first rank was ``warned`` after the
        ``done`` steps and ``training.on_warning`` is ``stop``.
        """
        if self.training.on_warning != "stop" or not (text := broadcast_object("; ".join(warned))):
            return
        self.save_now(done)
        self.saver.wait()
        raise UserError(
            f"step {done} of {self.directory}: {text} (training.on_warning=stop; saved, --resume "
            "auto continues)"
        )

    def save_and_end(self, why: UserError, done: int) -> NoReturn:
        """Checkpoint after the ``done`` steps and raise ``why`` as a :class:`UserError` that says
        how to go on.
        """
        if done:
            self.save_now(done)
        self.saver.wait()
        saved = (
            f"saved after step {done}; --resume auto continues {self.directory}"
            if done
            else "nothing to save yet"
        )
        raise UserError(f"{why}; {saved}") from None

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Complete the checkpoint on its way where all ranks raise a :class:`UserError` inside the
        block.
        """
        try:
            yield
        except UserError:
            self.saver.wait()
            raise

    def _begin(self, step: int) -> None:
        run = {
            "seed": self.identity["seed"],
            "data": {
                "consumed_prompts": self.sampler.consumed_prompts(step),
                **self.identity["data"],
            },
            "reward": {
                "nonfinite_in_a_row": self.updater.nonfinite_in_a_row,
                "entropy_coefs": self.updater.entropy_coefs,
            },
            "engine": {"weights_version": step},  # what it has, or is about to get
            "rollout": {
                "carried": saved_groups(self.sampler.carried),
                "group_size": self.sampler.rollout.group_size,
            },
        }
        with self.offload.on_device():
            self.saver.begin(step, checkpoint_state(self.policy, self.optimizer, step, run))
        self.saved_step = step

    def _restore(self, saved: dict[str, Any]) -> None:
        """Hand the parts what they saved. Seed and data must be those of the checkpoint: otherwise
        the run would be another one from here on. The prompts go on behind the last one consumed.
        """
        step, data = saved["iteration"], saved["data"]
        for name, value, kept in (
            ("seed", self.identity["seed"], saved["seed"]),
            *(
                (f"data.{key}", self.identity["data"][key], data[key])
                for key in ("prompts_per_step", "shuffle")
            ),
        ):
            if value != kept:
                raise UserError(
                    f"{self.directory} was started with {name}={kept}, not {value}; keep it to "
                    "resume"
                )
        if data["fingerprint"] != self.identity["data"]["fingerprint"]:
            raise UserError(
                f"{self.directory} was started with other prompts than data.path holds now (or "
                "they are formatted "
                "differently); restore them to resume, or start another run_dir"
            )
        if (version := saved["engine"]["weights_version"]) != step:
            raise UserError(
                f"the checkpoint of step {step} in {self.directory} contradicts itself: engine at "
                f"version {version}"
            )
        rollout, size = saved.get("rollout", {"carried": []}), self.sampler.rollout.group_size
        if rollout["carried"] and rollout.get("group_size", size) != size:
            raise UserError(
                f"{self.directory} carries unfinished groups of "
                f"rollout.group_size={rollout['group_size']}, not {size}; "
                "keep it to resume"
            )
        groups = restored_groups(rollout["carried"], self.sampler.draw, size)
        self.sampler.restore(step, int(data["consumed_prompts"]), groups)
        self.updater.nonfinite_in_a_row = int(saved["reward"]["nonfinite_in_a_row"])
        if self.updater.method.options.entropy_target and "entropy_coefs" in saved["reward"]:
            coef, acting = map(float, saved["reward"]["entropy_coefs"])
            self.updater.set_entropy_coefs((coef, acting))
