"""Python modules without the seconds of their imports: a process that has made them runs each in a
fork of itself.

What runs is otherwise as a user's: its own process, arguments, environment, output and exit status;
but an evaluation has no pictures.
On a machine with a GPU each is started anew: whoever has asked for CUDA, as the imports do, has no
fork that can use it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_dcpo.runtime.device import has_cuda
from tests.helpers import processes
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.transformer_engine import pretend

_LOOKED = 0.002  # seconds between two looks at whether it is time for a signal
_ORPHANS_END = 30.0  # seconds within which what a killed process has started ends
_STARTS = 240.0  # seconds within which a server has made its imports, however busy the machine is


class Ended(NamedTuple):
    """A process that has ended."""

    pid: int
    returncode: int
    stdout: str
    stderr: str


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
            statuses = server.answer(timeout)
        except subprocess.TimeoutExpired:
            _end(server, pids)
            raise
        first = next(filter(None, statuses), 0)
        return _completed([module, *arguments], first, outputs)


def run_apart(
    module: str,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    timeout: float,
) -> list[Ended]:
    """What :func:`run` does, with processes of which none is ended when another one fails."""
    if has_cuda():
        return _started_apart([module, *arguments], environments, timeout)
    server = _server(frozenset())
    with tempfile.TemporaryDirectory() as scratch:
        outputs = _outputs(scratch, len(environments))
        words = [module, *arguments]
        pids = _asked(server, words, environments, outputs, REPOSITORY, apart=True)
        try:
            statuses = server.answer(timeout)
        except subprocess.TimeoutExpired:
            _end(server, pids)
            raise
        return [
            Ended(pid, status, Path(out).read_text(), Path(err).read_text())
            for pid, status, (out, err) in zip(pids, statuses, outputs, strict=True)
        ]


def _started_apart(
    words: Sequence[str], environments: Sequence[Mapping[str, str]], timeout: float
) -> list[Ended]:
    """What :func:`run_apart` does, by processes that make their own imports."""
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, "-m", *words], env=dict(own), cwd=REPOSITORY, **how)
        for own in environments
    ]
    said = [process.communicate(timeout=timeout) for process in started]
    return [
        Ended(process.pid, process.returncode, out, err)
        for process, (out, err) in zip(started, said, strict=True)
    ]


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
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as scratch:
        outputs = _outputs(scratch, 1)
        started: list[int] = []
        (pid,) = _asked(server, [module, *arguments], [environment], outputs, REPOSITORY)
        while not server.has_answered(_LOOKED):
            if is_time() or time.monotonic() > deadline:
                started = processes.below(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                break
        try:
            (status,) = server.answer(timeout)
        except subprocess.TimeoutExpired:
            _end(server, [pid])
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
    server: Connection,
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    outputs: Sequence[list[str]],
    cwd: Path,
    apart: bool = False,
) -> list[int]:
    """Ask the server for forks that run ``MODULE ARGUMENTS``; return their process ids."""
    ranks = [
        {"environment": dict(own), "to": to} for own, to in zip(environments, outputs, strict=True)
    ]
    module, *arguments = words
    request = {"module": module, "argv": arguments, "ranks": ranks, "cwd": str(cwd)}
    server.send(request | {"apart": apart})
    return list(server.answer(_STARTS))


def _end(server: Connection, pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    server.answer(60)


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


class Connection:
    """One end of a socket on which requests and answers go, a line of JSON each."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""

    def send(self, message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Any:
        """Return the next message; None when the other end has been closed."""
        while b"\n" not in self._received:
            received = self.socket.recv(1 << 16)
            if not received:
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def has_answered(self, seconds: float) -> bool:
        return b"\n" in self._received or bool(select.select([self.socket], [], [], seconds)[0])

    def answer(self, timeout: float) -> Any:
        if not self.has_answered(timeout):
            raise subprocess.TimeoutExpired("warm", timeout)
        answer = self.receive()
        assert answer is not None, "the warm process has ended"
        return answer


@functools.cache
def _server(environment: frozenset[tuple[str, str]]) -> Connection:
    """A connection to the server with these imports, which all workers of pytest-xdist share: the
    first of them starts it, and it ends with the last.
    """
    of_this_run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    name = hashlib.sha256(repr((of_this_run, sorted(environment))).encode()).hexdigest()[:16]
    address = str(Path(tempfile.gettempdir(), f"dcpo_warm_{name}"))
    connection = socket.socket(socket.AF_UNIX)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(address)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen()
                _start(listener, environment)
            connection.connect(address)
    return Connection(connection)


def _start(listener: socket.socket, environment: frozenset[tuple[str, str]]) -> None:
    subprocess.run(
        [sys.executable, "-m", "tests.helpers.warm", str(listener.fileno())],
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment),
        check=True,
    )


def _serve(listener: socket.socket) -> None:
    """Fork for every connection; end when they have been closed."""
    pretend()
    import torch._dynamo  # noqa: F401

    import megatron_dcpo.evaluation.evaluation_run  # noqa: F401
    import megatron_dcpo.training.loop  # noqa: F401
    from megatron_dcpo.calibration import diagrams
    from megatron_dcpo.rollout.tokens import load_tokenizer
    from megatron_dcpo.rollout.transformers_library import auto_class
    from tests.helpers import pictures

    for name, function in pictures.NONE.items():
        setattr(diagrams, name, function)
    auto_class(
        "AutoModelForCausalLM"
    )  # with what torch's optimizers import 2 s, which every rank would take itself
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    auto_class("AutoModelForCausalLM").from_pretrained(QUICKSTART / "policy")  # its tables of names
    load_tokenizer(QUICKSTART / "policy")
    gc.collect()
    gc.freeze()  # else each fork looks through all of this when it collects and when it ends, 0.8 s

    serving: set[int] = set()
    while True:
        while serving and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            serving.discard(ended)
            if not serving:
                for path in (listener.getsockname(), f"{listener.getsockname()}.lock"):
                    os.unlink(path)
                return
        if select.select([listener], [], [], 0.5)[0]:
            connection, _ = listener.accept()
            if pid := os.fork():
                serving.add(pid)
                connection.close()
            else:
                listener.close()
                _serve_one(Connection(connection))
                os._exit(0)


def _serve_one(client: Connection) -> None:
    while (request := client.receive()) is not None:
        running = [_forked(request, rank) for rank in request["ranks"]]
        client.send(running)
        client.send(_statuses(running, ends_others=not request["apart"]))


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
    try:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        sys.exit()
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            _leave(ended.code or 0)
        raise


def _leave(status: int) -> NoReturn:
    """End as an interpreter does, but for taking down its modules, which takes 0.3 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _statuses(pids: list[int], ends_others: bool) -> list[int]:
    """Return the exit statuses of processes; where the first that fails ends the others, in the
    order in which they ended.
    """
    found: dict[int, int] = {}
    failed = False
    while len(found) < len(pids):
        pid, status = os.wait()
        found[pid] = os.waitstatus_to_exitcode(status)
        if found[pid] and ends_others and not failed:
            failed = True
            for other in set(pids) - found.keys():
                os.kill(other, signal.SIGKILL)
    return [*found.values()] if ends_others else [found[pid] for pid in pids]


if __name__ == "__main__":
    # below no worker: there are tests that end, or count, all processes below their own
    if os.fork():
        os._exit(0)
    _serve(socket.socket(fileno=int(sys.argv[1])))
