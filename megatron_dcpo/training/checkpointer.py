"""Saving on schedule, stopping in good order, and continuing after the last intact checkpoint."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megatron_dcpo.checkpoints.manifest import (
    check_fresh,
    iteration_dir,
    iterations,
    latest_iteration,
)
from megatron_dcpo.checkpoints.saver import Saver, read_best, remove_leftovers
from megatron_dcpo.checkpoints.staleness import Marks, marks
from megatron_dcpo.checkpoints.state import (
    Optimizer,
    checkpoint_state,
    load_checkpoint,
    newest_intact,
)
from megatron_dcpo.config import LoopConfig
from megatron_dcpo.errors import EXIT_INTERRUPTED, EXIT_REQUEUE, Stopped, UserError, one_line
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.distributed import Topology, broadcast_object, max_over_ranks

logger = logging.getLogger(__name__)


class Part(Protocol):
    """A part of the run that a checkpoint remembers, as plain values and tensors, equal on all
    ranks.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint after the current step holds."""
        ...

    def load_state_dict(self, saved: Mapping[str, Any], step: int) -> None:
        """Continue after ``step``. Raises :class:`UserError` when the options no longer fit, and
        TypeError, ValueError or LookupError for malformed state.
        """
        ...


class Model(Protocol):
    """The sharded state of policy and optimizer."""

    def state(self, step: int, run: dict[str, Any]) -> dict[str, Any]:
        """Return what is written after ``step``; ``run`` are its plain values."""
        ...

    def marks(self) -> Marks:
        """Return the marks (``checkpoints/staleness.py``) of what training changes, read from the
        model and not from its :meth:`state`.
        """
        ...

    def load(self, directory: Path, step: int) -> dict[str, Any]:
        """Restore the model from the checkpoint of ``step``; return its plain values."""
        ...


@dataclass(frozen=True)
class MegatronModel:
    """Policy and optimizer in Megatron's distributed checkpoint format."""

    policy: Policy
    optimizer: Optimizer

    def state(self, step: int, run: dict[str, Any]) -> dict[str, Any]:
        """Return the sharded state. Collective."""
        return checkpoint_state(self.policy, self.optimizer, step, run)

    def marks(self) -> Marks:
        """Return the marks of weights, moments and schedule on this rank."""
        schedule = {"opt_param_scheduler": (self.optimizer.scheduler.num_steps,)}
        return {**marks(self.optimizer.trained()), **schedule}

    def load(self, directory: Path, step: int) -> dict[str, Any]:
        """Restore parameters, moments, schedule and generators. Collective."""
        return load_checkpoint(directory, step, self.policy, self.optimizer)


@dataclass(frozen=True)
class Identity:
    """What must be the same when a run is resumed: otherwise the run would silently change.

    ``data`` are options of the section ``data``, ``fingerprint`` names what the sources hold.
    """

    seed: int
    data: Mapping[str, int | bool]
    fingerprint: str

    def check(self, saved: Mapping[str, Any], directory: Path) -> None:
        """Raise :class:`UserError` when a checkpoint is of another run."""
        values = {"seed": (self.seed, saved["seed"])}
        for option, value in self.data.items():
            values[f"data.{option}"] = (value, saved["data"][option])
        for option, (now, then) in values.items():
            if now != then:
                raise UserError(
                    f"{directory} was started with {option}={then}, not {now}; keep it to resume"
                )
        if saved["data"]["fingerprint"] != self.fingerprint:
            raise UserError(
                f"{directory} was started with other prompts than data.path holds now (or data.row "
                "or data.template makes others of its rows); restore them to resume, or start "
                "another run_dir"
            )


class Checkpointer:
    """Saves a run to ``run_dir/checkpoints`` and restores it. All methods are collective.

    ``model`` and the named ``parts`` are what a checkpoint holds. ``on_device`` opens a context in
    which the engine sleeps and the whole state of the model is on the device. ``saved_step`` is the
    step of the last checkpoint.
    """

    def __init__(
        self,
        saver: Saver,
        model: Model,
        parts: Mapping[str, Part],
        identity: Identity,
        on_device: Callable[[], AbstractContextManager[None]],
        topology: Topology,
        training: LoopConfig,
    ) -> None:
        self.saver = saver
        self.directory = saver.directory.parent
        self.model = model
        self.parts = parts
        self.identity = identity
        self.on_device = on_device
        self.topology = topology
        self.training = training
        self.saved_step = 0

    def resume(self) -> int:
        """Restore the newest intact checkpoint; return the number of steps already done, 0 for a
        fresh run.

        ``training.resume=none`` refuses to overwrite a run that has checkpoints, and ``strict`` to
        continue after another one than the last. Raises :class:`UserError`.
        """
        checkpoints = self.saver.directory
        announced = broadcast_object(latest_iteration(checkpoints))
        check_fresh(self.directory, announced, self.training.resume)
        latest, damaged = newest_intact(checkpoints, self.topology)
        if latest is None:
            return 0
        self._accept(damaged, latest)
        with self.on_device():
            saved = self.model.load(checkpoints, latest)
            self.saver.continue_after(latest, {**self.model.marks(), "run": (latest,)})
        try:
            self._restore(saved)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            # torch raises RuntimeError for a tensor where a number should be
            path = iteration_dir(checkpoints, latest)
            what = f"{type(error).__name__}: {one_line(error, 200)}"
            raise UserError(f"checkpoint {path} cannot be read ({what})") from None
        self.saved_step = latest
        if self.topology.rank == 0:
            remove_leftovers(checkpoints)
            logger.info("continuing %s after step %d", self.directory, latest)
        return latest

    def save(self, step: int) -> None:
        """Begin a checkpoint after ``step`` when the schedule says so, and always after the last
        step.

        A save needs no memory of the device, but nothing else may allocate during a save.
        :meth:`announce` makes the checkpoint the latest, once the records of the step are written.
        """
        interval = self.training.save_interval
        is_due = interval > 0 and step % interval == 0
        if is_due or step == self.training.steps:
            self._begin(step)

    def save_now(self, step: int) -> None:
        """Begin a checkpoint after ``step``, unless the schedule has. The engine sleeps
        after it.
        """
        if self.saved_step != step:
            self._begin(step)

    def announce(self, step: int) -> None:
        """Make the checkpoint that is written the latest; wait for it after the last step."""
        if step == self.training.steps:
            self.saver.wait()
        else:
            self.saver.finish()

    def keep(self, step: int, metric: str, value: float) -> None:
        """Keep the checkpoint of ``step``, as the best by ``metric``, when older ones are
        removed.
        """
        self.saver.best = {"iteration": step, "metric": metric, "value": value}

    def recorded_best(self) -> dict[str, Any] | None:
        """Return the contents of ``best.json`` as the first rank reads them: ``iteration``,
        ``metric`` and ``value``.
        """
        best = None
        if self.topology.rank == 0:
            best = read_best(self.saver.directory)
        return broadcast_object(best)

    def intact_steps(self) -> list[int]:
        """Return the steps of the checkpoints on the disk, without the damaged ones."""
        present = broadcast_object(iterations(self.saver.directory))
        return [step for step in present if step not in self.saver.damaged]

    def stop_if_asked(self, done: int) -> None:
        """Checkpoint after the ``done`` steps and raise :class:`Stopped` when a signal has reached
        any rank.

        It is called when the policy is that of a whole number of steps: after a rollout, which a
        signal cuts short, and after a step. A run that has done all its steps goes on to its end.
        """
        number = max_over_ranks(signals.stop_requested() or 0)
        if not number or done == self.training.steps:
            return
        if done:
            self.save_now(done)
        self.saver.wait()
        signals.ignore_signals()
        saved = "saved" if done else "nothing to save yet"
        raise Stopped(
            f"stopped by {signals.name_of(number)} after step {done} of {self.training.steps}, "
            f"{saved}; --resume auto continues {self.directory}",
            EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE,
        )

    def save_and_end(self, why: UserError, done: int) -> NoReturn:
        """Checkpoint after the ``done`` steps and raise ``why`` as a :class:`UserError` that says
        how to go on.
        """
        saved = "nothing to save yet"
        if done:
            saved = f"saved after step {done}; --resume auto continues {self.directory}"
        try:
            if done:
                self.save_now(done)
            self.saver.wait()
        except UserError as unsaved:
            saved = str(unsaved)
        raise UserError(f"{why}; {saved}") from None

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Complete the checkpoint on its way when all ranks raise a :class:`UserError` inside the
        block. If that fails too, it is logged, and the error of the block is raised.
        """
        try:
            yield
        except UserError:
            try:
                self.saver.wait()
            except UserError as unsaved:
                logger.error("%s", unsaved)
            raise

    def _accept(self, damaged: Mapping[int, str], latest: int) -> None:
        """Say which newer checkpoints than the ``latest`` intact one are ``damaged``, and how many
        steps that costs. Raises :class:`UserError` if ``training.resume`` is ``strict``.
        """
        if not damaged:
            return
        self.saver.damaged.update(damaged)
        lost = max(damaged) - latest
        named = []
        for iteration, why in damaged.items():
            path = iteration_dir(self.saver.directory, iteration)
            named.append(f"checkpoint {path} is damaged: {why}")
        cost = f"{lost} step(s) after step {latest}"
        if self.training.resume == "strict":
            raise UserError(
                f"{'; '.join(named)}. The newest intact checkpoint is that of step {latest}; "
                f"--resume auto continues after it and does {cost} once more"
            )
        if self.topology.rank == 0:
            for line in named:
                logger.warning("%s", line)
            logger.warning("%s are lost and done once more", cost)

    def _begin(self, step: int) -> None:
        run = {
            "seed": self.identity.seed,
            "data": {**self.identity.data, "fingerprint": self.identity.fingerprint},
            "engine": {"weights_version": step},  # which the engine has, or is about to get
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        with self.on_device():
            current = {**self.model.marks(), "run": (step,)}
            self.saver.begin(step, self.model.state(step, run), current)
        self.saved_step = step

    def _restore(self, saved: dict[str, Any]) -> None:
        """Give each part its saved state. Raises :class:`UserError`, and TypeError, ValueError or
        LookupError for malformed state.
        """
        step = saved["iteration"]
        self.identity.check(saved, self.directory)
        version = saved["engine"]["weights_version"]
        if version != step:
            raise UserError(
                f"the checkpoint of step {step} in {self.directory} contradicts itself: engine at "
                f"version {version}"
            )
        for name, part in self.parts.items():
            part.load_state_dict(saved["parts"][name], step)
