"""Generation beside training (``rollout.async_steps: 1``): the next batch is sampled while this one
trains.

The same calls as one after the other, in another order: ``Sampler.sample(step + 1)`` runs in a
thread while the step trains, and has ended before the engine gets new weights. So one batch is on
its way, all of it with the weights that the engine had when it began, one update behind those that
train on it. With ``rollout.async_update: immediate`` the engine gets the new weights between two
requests of the batch, and what it samples from then on is of the policy that trains on it.
"""

from __future__ import annotations

import copy
import logging
import threading
from concurrent.futures import CancelledError, Executor, Future
from types import SimpleNamespace
from typing import Any

from megatron_dcpo.errors import Stopped
from megatron_dcpo.judging.function_verifier import VerifierFailed
from megatron_dcpo.rollout import EngineError
from megatron_dcpo.runtime import distributed
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.sampler import Sampler
from megatron_dcpo.types import TrainingSample

logger = logging.getLogger(__name__)

_ON_ALL_RANKS = (
    EngineError,
    RolloutAbandoned,
    VerifierFailed,
)  # what a rollout raises on all ranks or none


def ahead_of(sampler: Sampler, steps: int, timeout_minutes: int) -> Any:
    """Return :class:`Ahead`, or without ``async_steps`` what samples a batch when it is taken."""
    if sampler.rollout.async_steps:
        return {"batch": Ahead, "immediate": Immediate}[sampler.rollout.async_update](
            sampler, steps, timeout_minutes
        )

    def nothing(*_: Any) -> None:
        return None

    return SimpleNamespace(
        take=sampler.sample, start=nothing, wait=nothing, complete=nothing, close=nothing
    )


class Ahead:
    """Hands over the batch of a step, sampled now or beside the step before. ``steps``: of the run.

    The thread works on a copy of the ``sampler`` and communicates through a group of its own. The
    sampler becomes the copy when the batch is taken, so that a checkpoint never knows of what is on
    its way: a resumed run generates it anew.
    """

    behind = range(1, 2)  # by how many updates the engine may be

    def __init__(self, sampler: Sampler, steps: int, timeout_minutes: int) -> None:
        self.sampler, self.steps = sampler, steps
        self.group = distributed.group_beside(timeout_minutes)
        self.working = sampler  # the copy of the batch on its way
        self.batch: Future[list[TrainingSample]] | None = None
        self.over = threading.Event()

    def take(self, step: int) -> list[TrainingSample]:
        """Return the samples of ``step``, and raise what :meth:`Sampler.sample` raises. Collective.
        A batch whose engine failed is generated anew, by the weights that the engine has got since.
        """
        batch, self.batch = self.batch, None
        if batch is not None:
            try:
                samples = batch.result()
            except EngineError as failed:
                if self.sampler.topology.rank == 0:
                    logger.warning("%s; the batch of step %d is generated anew", failed, step)
            else:
                done = self.working
                self.sampler.extra_prompts, self.sampler.carried = done.extra_prompts, done.carried
                self.sampler.metrics = done.metrics
                assert done.metrics["rollout/staleness_max"] <= done.rollout.most_versions_behind, (
                    f"step {step}"
                )
                return samples
        return self.sampler.sample(step)

    def start(self, step: int) -> None:
        """Begin to sample the batch of ``step`` with the weights that the engine has."""
        if step > self.steps:
            return
        self.working, self.batch = copy.copy(self.sampler), Future()
        self.working.behind = self.behind
        self.working.executor = _Judges(self.sampler.executor, self.over)
        self.working.timers, self.working.recover = Timers(None), _end_on_all_ranks
        thread = threading.Thread(
            target=self._sample, args=(self.working, self.batch, step), name="rollout"
        )
        thread.daemon = True  # a run that fails does not wait for the engine
        thread.start()

    def wait(self) -> None:
        """Wait until the engine may get new weights."""
        self.complete()

    def complete(self) -> None:
        """Wait for the batch on its way, where there is one: ``time/rollout``. The engine is idle
        then. Raises what ended it on this rank alone; the rest is for :meth:`take`.
        ``time/rollout_busy``: how long it took.
        """
        if self.batch is None:
            return
        with self.sampler.timers("rollout"):
            error = self.batch.exception()
        seconds = self.working.timers.seconds
        self.working.timers.clear()  # once
        self.sampler.timers.add(
            "rollout_busy", seconds.get("rollout", 0.0) + seconds.get("judge", 0.0)
        )
        self.sampler.timers.add("judge_busy", seconds.get("judge_busy", 0.0))
        if error is not None and not isinstance(error, _ON_ALL_RANKS):
            raise error

    def close(self, *raised: Any) -> None:
        """Give up what is on its way: the run ends, by what is ``raised``. A signal ends the batch
        as well: wait for it.
        """
        if Stopped in raised and self.batch is not None:
            self.batch.exception()
        self.over.set()

    def _sample(self, sampler: Sampler, batch: Future[list[TrainingSample]], step: int) -> None:
        distributed.GROUP.set(self.group)
        try:
            batch.set_result(sampler.sample(step))
        except BaseException as error:
            batch.set_exception(error)


class Immediate(Ahead):
    """Lets the engine have new weights within a batch, between two requests
    (``ServerEngine.update_weights``).
    """

    behind = range(2)

    def take(self, step: int) -> list[TrainingSample]:
        """Wait for the batch of ``step`` and return it."""
        self.complete()
        return super().take(step)

    def wait(self) -> None:
        """Do nothing: the engine says itself when it takes new weights."""


class _Judges(Executor):
    """``executor`` until the run is ``over``: then it ends the rollout that has something to judge."""

    def __init__(self, executor: Executor, over: threading.Event) -> None:
        self.executor, self.over = executor, over

    def submit(self, *call: Any, **options: Any) -> Future[Any]:  # type: ignore[override]
        if self.over.is_set():
            raise CancelledError
        return self.executor.submit(*call, **options)


def _end_on_all_ranks(failure: str, version: int, restarts: int) -> bool:
    """Raise :class:`EngineError` on all ranks where an engine failed on one: new weights, which a
    restart needs, have to wait for the training. Collective.
    """
    if failures := [text for text in distributed.all_gather_objects(failure) if text]:
        raise EngineError(failures[0])
    return False
