"""Wall-clock seconds and memory per phase of a step, measured after the device is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dcpo.runtime.device import memory_gb, synchronize
from megatron_dcpo.runtime.watchdog import Watchdog


class Timers:
    """``with timers("rollout"): ...`` adds to ``seconds["rollout"]`` and notes ``memory["rollout/rss"]`` in GB.

    The watchdog is told which phase of ``step`` this rank is in. ``clear`` after a step is recorded: its checkpoint comes
    later, and is found in the next record.
    """

    def __init__(self, watch: Watchdog) -> None:
        self.watch, self.step = watch, 0
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}

    def clear(self) -> None:
        self.seconds, self.memory = {}, {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        self.watch.enter(phase, self.step)
        yield
        synchronize()
        self.add(phase, time.perf_counter() - start)
        self.memory |= {f"{phase}/{kind}": gigabytes for kind, gigabytes in memory_gb().items()}

    def add(self, phase: str, seconds: float) -> None:
        """More seconds of a phase; also called from the judge's thread."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
