"""Python modules without the seconds of their imports: a process that has made them runs each in a
fork of itself.

What runs is otherwise as a user's: its own process, arguments, environment, output and exit status.
On a machine with a GPU each is started anew: whoever has asked for CUDA, as the imports do, has no
fork that can use it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dcpo.runtime.device import has_cuda
from tests.helpers import processes
from tests.helpers.paths import REPOSITORY
from tests.helpers.transformer_engine import pretend

_LOOKED = 0.002  # seconds between two looks at whether it is time for a signal
_ORPHANS_END = 30.0  # seconds within which what a killed process has started ends
_STARTS = 240.0  # seconds within which a server has made its imports, however busy the machine is


def run(
    module: str,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout: float,
    imports_in: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
) -> subprocess.CompletedProcess[str]:
    """``python -m MODULE ARGUMENTS`` of this checkout in ``cwd``, a process with each of
    ``environments``, at once; their output, one after the other, and the first status that is not 0
    (the others are then ended). Raises TimeoutExpired.

    ``imports_in``: variables on which it depends what is imported; such processes are forks of a
    server with them.
    """
    if has_cuda():
        return _started(module, arguments, environments, timeout, cwd)
    server = _server(frozenset((imports_in or {}).items()))
    with tempfile.TemporaryDirectory() as scratch:
        outputs = _outputs(scratch, len(environments))
        pids = _asked(server, [module, *arguments], environments, outputs, cwd)
        try:
            status = _answer(server, timeout)
        except subprocess.TimeoutExpired:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            _answer(server, 60)
            raise
        return _completed([module, *arguments], status, outputs)


def kill(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    is_time: Callable[[], bool],
    number: int = signal.SIGKILL,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """What :func:`run` does with one process, which gets a signal as soon as ``is_time`` says so;
    it may have ended before. What it has started ends with it. Raises TimeoutExpired.
    """
    if has_cuda():
        return _started_and_killed([module, *arguments], environment, is_time, number, timeout)
    server = _server(frozenset())
    assert server.stdout is not None
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as scratch:
        outputs = _outputs(scratch, 1)
        started: list[int] = []
        (pid,) = _asked(server, [module, *arguments], [environment], outputs, REPOSITORY)
        while not select.select([server.stdout], [], [], _LOOKED)[0]:
            if is_time() or time.monotonic() > deadline:
                started = processes.below(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                break
        try:
            status = _answer(server, timeout)
        except subprocess.TimeoutExpired:
            os.kill(pid, signal.SIGKILL)
            _answer(server, 60)
            raise
        assert not processes.left_after(started, _ORPHANS_END)
        return _completed([module, *arguments], status, outputs)


def _started_and_killed(
    words: Sequence[str],
    environment: Mapping[str, str],
    is_time: Callable[[], bool],
    number: int,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """What :func:`kill` does, by a process that makes its own imports."""
    command = [sys.executable, "-m", *words]
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as scratch:
        outputs = _outputs(scratch, 1)
        with open(outputs[0][0], "w") as out, open(outputs[0][1], "w") as err:
            process = subprocess.Popen(
                command, stdout=out, stderr=err, env=dict(environment), cwd=REPOSITORY
            )
        while process.poll() is None and not is_time() and time.monotonic() < deadline:
            time.sleep(_LOOKED)
        process.send_signal(number)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        return _completed(command, status, outputs)


def _outputs(scratch: str, count: int) -> list[list[str]]:
    """Return the files for stdout and stderr of so many processes."""
    return [[str(Path(scratch, f"{name}{n}")) for name in ("out", "err")] for n in range(count)]


def _asked(
    server: subprocess.Popen[str],
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    outputs: Sequence[list[str]],
    cwd: Path,
) -> list[int]:
    """Ask the server for forks that run ``MODULE ARGUMENTS``; return their process ids."""
    assert server.stdin is not None
    ranks = [
        {"environment": dict(own), "to": to} for own, to in zip(environments, outputs, strict=True)
    ]
    module, *arguments = words
    request = {"module": module, "argv": arguments, "ranks": ranks, "cwd": str(cwd)}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    return list(_answer(server, _STARTS))


def _completed(
    arguments: list[str], status: int, outputs: list[list[str]]
) -> subprocess.CompletedProcess[str]:
    out, err = (
        "".join(Path(path).read_text() for path in paths) for paths in zip(*outputs, strict=True)
    )
    return subprocess.CompletedProcess(arguments, status, out, err)


def _started(
    module: str,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout: float,
    cwd: Path,
) -> subprocess.CompletedProcess[str]:
    """What :func:`run` does, by processes that make their own imports."""
    command, first, deadline = (
        [sys.executable, "-m", module, *arguments],
        0,
        time.monotonic() + timeout,
    )
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as files:
        outputs = _outputs(scratch, len(environments))
        streams = [[files.enter_context(open(path, "w")) for path in paths] for paths in outputs]
        running = [
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(own), cwd=cwd
            )
            for own, (out, err) in zip(environments, streams, strict=True)
        ]
        try:
            while None in (ended := [process.poll() for process in running]):
                first = next(filter(None, ended), 0)
                if first:
                    break
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired(command, timeout)
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return _completed([module, *arguments], first or next(filter(None, ended), 0), outputs)


@functools.cache
def _server(environment: frozenset[tuple[str, str]]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.warm"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment),
    )
    atexit.register(server.kill)
    return server


def _answer(server: subprocess.Popen[str], timeout: float) -> Any:
    assert server.stdout is not None
    if not select.select([server.stdout], [], [], timeout)[0]:
        raise subprocess.TimeoutExpired("warm", timeout)
    return json.loads(server.stdout.readline())


def _serve() -> None:
    pretend()
    import torch._dynamo  # noqa: F401

    import megatron_dcpo.training.loop  # noqa: F401
    from megatron_dcpo.rollout.transformers_library import auto_class

    auto_class(
        "AutoModelForCausalLM"
    )  # with what torch's optimizers import 2 s, which every rank would take itself
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    gc.collect()
    gc.freeze()  # else each fork looks through all of this when it collects and when it ends, 0.8 s

    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        running = [_forked(request, rank) for rank in request["ranks"]]
        print(json.dumps(running), flush=True)
        print(_first_failure({*running}), flush=True)


def _forked(request: dict[str, Any], rank: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(rank["to"], 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.clear()
    os.environ.update(rank["environment"])
    os.chdir(request["cwd"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [request["cwd"], *filter(None, paths), str(REPOSITORY)]  # as -m has them
    sys.argv = [request["module"], *request["argv"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    sys.exit()


def _first_failure(running: set[int]) -> int:
    first = 0
    while running:
        pid, status = os.wait()
        running.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code
            for other in running:
                os.kill(other, signal.SIGKILL)
    return first


if __name__ == "__main__":
    _serve()
