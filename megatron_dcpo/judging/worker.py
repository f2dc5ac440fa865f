"""One worker process: a JSON list per line on stdin, a verdict as JSON per line on stdout. Started
by ``pool.py``, never by hand.

It imports only what its work needs. Three limits bound every pair: processor time (``--cpu``, an
exception that sympy cannot swallow forever; a busy machine does not change verdicts), wall time
(``--wall``, a watchdog that ends the process even inside a big-integer operation), and memory
(``--memory``, bytes of address space). A worker that holds half of that memory after a pair says so
and ends, so that no pair depends on the memory that earlier ones have left. The worker ends when
its parent does.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import IO


class OutOfTime(BaseException):
    """Not an ``Exception``, so that neither sympy nor math-verify catches it in passing."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", type=float, required=True, help="processor seconds per pair")
    parser.add_argument(
        "--wall",
        type=float,
        required=True,
        help="wall-clock seconds per pair until the process ends",
    )
    parser.add_argument("--memory", type=int, required=True, help="bytes of address space")
    parser.add_argument(
        "--beyond-imports",
        action="store_true",
        help="--memory does not include what the imports take",
    )
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("load", help="module:function that returns the judge")
    parser.add_argument("arguments", nargs="*")
    limits = parser.parse_args()
    # Nothing that a library prints may be taken for a verdict, and a user's function must not read
    # the pairs.
    pairs = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(limits.parent,), daemon=True).start()
    signal.signal(signal.SIGPROF, _out_of_time)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # for the parent only
        signal.signal(stop, signal.SIG_IGN)

    module, _, name = limits.load.partition(":")
    judge = getattr(importlib.import_module(module), name)(*limits.arguments)
    address_space, resident = _memory_in_use() if limits.beyond_imports else (0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (address_space + limits.memory,) * 2)
    _say(answers, "ready")
    process = os.getpid()
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - as long as this process lives
    for line in pairs:
        faulthandler.dump_traceback_later(limits.wall, exit=True, file=nowhere)
        word = _judged(judge, json.loads(line), limits.cpu)
        faulthandler.cancel_dump_traceback_later()
        if os.getpid() != process:  # a child that the judge has forked
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        full = _memory_in_use()[1] > resident + limits.memory // 2
        _say(answers, "last " * full + word)
        if full:
            return


def _judged(judge: Callable[..., object], pair: list[str], cpu_seconds: float) -> str:
    """Return the verdict as JSON, ``late``, or ``raised``, since sampled text makes sympy and the
    LaTeX grammar raise almost anything.
    """
    try:
        # The signal repeats, because a bare ``except`` on the way may swallow the first one.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.2)
        try:
            return json.dumps(judge(*pair))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
    except OutOfTime:
        return "late"
    except (Exception, RecursionError, MemoryError):
        return "raised"


def _memory_in_use() -> tuple[int, int]:
    """Return the bytes of address space and of resident memory."""
    with open("/proc/self/statm") as file:
        total, resident = file.read().split()[:2]
    return int(total) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _out_of_time(_signal: int, _frame: object) -> None:
    raise OutOfTime


def _say(stream: IO[str], word: str) -> None:
    stream.write(word + "\n")
    stream.flush()


def _end_with(parent: int) -> None:
    """End with the parent. A killed parent leaves open the pipes that a sibling has inherited, so
    its process id is watched instead.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    if os.getpgrp() == os.getpid():  # with all processes that it has forked
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
