"""``dcpo`` that gets a signal in a phase of a step.

``python -m tests.helpers.signalled PHASE STEP SIGNAL TIMES RANK ARGUMENTS...`` is ``dcpo
ARGUMENTS...`` in which the process of that rank sends itself the signal, once or twice, when it is
in the phase. The phase ``setup`` is before the first step; ``Timers`` has the others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from megatron_dcpo.cli import main
from megatron_dcpo.config import Config
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training import loop
from megatron_dcpo.training.run import Run

PATIENCE = 30.0  # seconds


def interrupt(number: signal.Signals, times: int) -> None:
    """Send this process the signal, the second time when the first one has been noted."""
    for _ in range(times):
        os.kill(os.getpid(), number)
        _wait_until_noted()
    if times > 1:
        time.sleep(PATIENCE)  # it ends before


def _wait_until_noted() -> None:
    deadline = time.monotonic() + PATIENCE
    while signals.stop_requested() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def run(arguments: list[str]) -> int:
    phase, step, name, times, rank = arguments[:5]
    here = os.environ.get("RANK", "0") == rank
    waiting = [(signal.Signals[name], int(times))] if here else []
    timed, build = Timers.__call__, loop.build

    @contextlib.contextmanager
    def interrupted(timers: Timers, now: str) -> Iterator[None]:
        with timed(timers, now):
            if now == phase and timers.step >= int(step) and waiting:
                interrupt(*waiting.pop())
            yield

    def interrupted_build(config: Config) -> contextlib.AbstractContextManager[Run]:
        if phase == "setup" and waiting:
            interrupt(*waiting.pop())
        return build(config)

    Timers.__call__ = interrupted  # type: ignore[method-assign]
    loop.build = interrupted_build  # type: ignore[assignment]
    return main(arguments[5:])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
