"""One verifier process: a pair per line on stdin, a verdict per line on stdout. Started by ``pool.py``, never by hand.

It imports math-verify and nothing of torch. Three limits bound every pair: processor time (``--cpu``, an exception that
sympy cannot swallow for ever, so that a busy machine does not change verdicts), wall time (``--wall``, a watchdog
that ends the process even inside a big-integer operation), and memory (``MEMORY_BYTES`` of address space; a worker that
holds half of it after a pair says so and ends, so that no pair is judged in what others have left over). It ends when
its parent does.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

MEMORY_BYTES = 1 << 30


class OutOfTime(BaseException):
    """No ``Exception``: neither sympy nor math-verify catches it in passing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", type=float, required=True, help="processor seconds per pair")
    parser.add_argument("--wall", type=float, required=True, help="seconds per pair until the process ends")
    parser.add_argument("--parent", type=int, required=True)
    limits = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not be read as a verdict
    threading.Thread(target=_end_with, args=(limits.parent,), daemon=True).start()
    signal.signal(signal.SIGPROF, _out_of_time)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # the parent's affair
        signal.signal(stop, signal.SIG_IGN)

    from megatron_dcpo.judging.math.equivalence import equivalent

    equivalent(r"\frac{x+1}{2}", r"0.5x+0.5")  # loads the grammar: the first pair should not pay for it
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    _say(answers, "ready")
    for line in sys.stdin:
        answer, key = json.loads(line)
        faulthandler.dump_traceback_later(limits.wall, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        word = _judged(equivalent, answer, key, limits.cpu)
        faulthandler.cancel_dump_traceback_later()
        full = _resident_bytes() > MEMORY_BYTES // 2
        _say(answers, word + " last" * full)
        if full:
            return


def _judged(equivalent: Any, answer: str, key: str, cpu_seconds: float) -> str:
    """Return ``yes``, ``no``, or ``late``. Sampled text makes sympy and the LaTeX grammar raise nearly anything: ``no``."""
    try:
        # Repeated: a bare ``except`` somewhere in between may swallow the first one.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.2)
        try:
            return "yes" if equivalent(answer, key) else "no"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except OutOfTime:
        return "late"
    except (Exception, RecursionError, MemoryError):
        return "no"


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _out_of_time(_signal: int, _frame: Any) -> None:
    raise OutOfTime


def _say(stream: Any, word: str) -> None:
    stream.write(word + "\n")
    stream.flush()


def _end_with(parent: int) -> None:
    """End with the parent: killed, it closes no pipe that a sibling has inherited, but its process id is gone."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


if __name__ == "__main__":
    main()
