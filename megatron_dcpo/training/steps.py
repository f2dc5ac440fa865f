"""The steps of any training, by RL or on demonstrations: from the last checkpoint to the last step,
a signal, or an early end; then the policy is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from megatron_dcpo.config import RunConfig
from megatron_dcpo.policy.model import Policy
from megatron_dcpo.policy.optimizer import Optimizer
from megatron_dcpo.runtime import distributed, signals
from megatron_dcpo.runtime.run_lock import lock_run_dir
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training import provenance
from megatron_dcpo.training.checkpointer import Checkpointer
from megatron_dcpo.training.records import Records
from megatron_dcpo.training.weight_sync import export_policy


class Parts(Protocol):
    """The parts of a training that its loop uses."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def timers(self) -> Timers: ...
    @property
    def checkpointer(self) -> Checkpointer: ...
    @property
    def records(self) -> Records: ...


def train_steps(
    parts: Parts,
    without_effect: Sequence[str],
    start: Callable[[int], None],
    step: Callable[[int], None],
    is_over: Callable[[int], bool] = lambda done: False,
) -> None:
    """Train the steps that are left, and export the policy. Collective.

    ``start(done)`` is called once after the ``done`` steps of the checkpoint, ``step(number)`` for
    each step that is left, unless ``is_over(done)`` ends the training before. Lines on options
    ``without_effect`` are logged. Raises :class:`UserError` on bad input, and :class:`Stopped`
    after a signal, when everything done is saved.
    """
    directory = Path(parts.config.run_dir)
    rank = parts.policy.topology.rank
    with lock_run_dir(directory, rank):
        signals.begin_saving()
        provenance.prepare(directory, parts.config, rank, without_effect)
        done = parts.checkpointer.resume()
        with parts.records.from_step(done + 1):
            start(done)
            for number in range(done + 1, parts.config.training.steps + 1):
                if is_over(number - 1):
                    break
                parts.timers.step = number
                step(number)
                parts.checkpointer.stop_if_asked(done=number)
        with parts.timers("export"):
            export_policy(directory, parts.config.model, parts.optimizer)
        distributed.barrier()
