"""Wall-clock seconds and memory per phase of a step, measured after the device is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dcpo import runtime


class Timers:
    """``with timers("rollout"): ...`` adds to ``seconds["rollout"]``; ``memory["rollout"]``: bytes in use at its end."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        runtime.synchronize()
        self.add(phase, time.perf_counter() - start)
        self.memory[phase] = runtime.memory_in_use()

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
