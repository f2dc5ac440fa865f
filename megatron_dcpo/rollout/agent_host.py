"""A fork server: imports the agent once, forks one process per session. ``agents.py`` starts it by
its file, in any Python of 3.9 or later: this file and ``agent_work.py`` need the standard library
alone.

A JSON object per line on stdin starts a session, or kills one; its result comes on stdout, as the
bytes that its process wrote, behind a line with its number, the status of its process and the count
of the bytes. When to give up a session is decided by who starts it. A session's process has a group
of its own, and a limit of memory. When stdin ends, everything ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import random
import resource
import selectors
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, NoReturn

MOST_BYTES = 1 << 20  # of what a session returns
_LOOK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class SessionWork(NamedTuple):
    """What a session runs, and what says why it has failed."""

    run: Callable[[dict[str, Any]], object]
    explained: Callable[[BaseException], str]


@dataclass
class _AgentProcess:
    """The process of a session, and what it has said of its result."""

    number: int
    pid: int
    pipe: int
    said: bytearray = field(default_factory=bytearray)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", type=int, required=True, help="bytes beyond the imports")
    parser.add_argument("kind", choices=("agent", "command"))
    parser.add_argument("text", help="what a session runs: an import path, or words of a command")
    options = parser.parse_args()
    # nothing that a session's module prints may be taken for a result
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    results = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    _ignore_stops()
    _ask_the_policy_without_a_proxy()
    work = _work_beside()
    try:
        run = work.load(options.kind, options.text)
    except BaseException as error:
        _say(results, 0, 0, json.dumps({"error": work.explained(error)}).encode())
        return
    _ignore_stops()  # what was loaded may have taken them
    _say(results, 0, 0, b'{"ready": true}')
    Host(SessionWork(run, work.explained), orders, results, options.memory).serve()


def _work_beside() -> ModuleType:
    """Return ``agent_work.py``, by its file: this Python may not have this package."""
    spec = importlib.util.spec_from_file_location(
        "agent_work", Path(__file__).with_name("agent_work.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _ignore_stops() -> None:
    """Leave the signals that end a run to the trainer."""
    for stop in _STOPS:
        signal.signal(stop, signal.SIG_IGN)


class Host:
    """Starts sessions, watches them, and says how they ended."""

    def __init__(self, work: SessionWork, orders: BinaryIO, results: BinaryIO, memory: int) -> None:
        self.work = work
        self.orders = orders
        self.results = results
        self.memory = memory
        self.running: dict[int, _AgentProcess] = {}  # by their pipes
        self.selector = selectors.DefaultSelector()
        self.selector.register(orders, selectors.EVENT_READ)
        self.received = bytearray()

    def serve(self) -> None:
        """Carry out orders until there are no more, then end all sessions."""
        is_open = True
        while is_open:
            for key, _ in self.selector.select(_LOOK_SECONDS):
                if key.fileobj is self.orders:
                    is_open = self._take_orders()
                elif key.fd in self.running:  # it may just have been ended
                    self._read(self.running[key.fd])
            for session in list(self.running.values()):
                if _has_ended(session.pid):
                    self._read(session)
        for session in list(self.running.values()):
            self._end(session)

    def _take_orders(self) -> bool:
        received = self.orders.read(1 << 16)
        if not received:
            return False
        self.received += received
        *lines, rest = self.received.split(b"\n")
        self.received = bytearray(rest)
        for line in lines:
            order = json.loads(line)
            if "kill" in order:
                for session in list(self.running.values()):
                    if session.number == order["kill"]:
                        self._end(session)
            else:
                self._start(order)
        return True

    def _start(self, order: dict[str, Any]) -> None:
        ends: tuple[int, ...] = ()
        try:
            ends = reader, writer = os.pipe()
            pid = os.fork()
        except OSError as error:
            for end in ends:
                os.close(end)
            why = {"error": f"no process: {error.strerror}"}
            _say(self.results, order["id"], 0, json.dumps(why).encode())
            return
        if pid == 0:
            self._in_session(order, writer)
        os.close(writer)
        os.set_blocking(reader, False)
        session = _AgentProcess(number=order["id"], pid=pid, pipe=reader)
        self.running[reader] = session
        self.selector.register(reader, selectors.EVENT_READ)

    def _in_session(self, order: dict[str, Any], writer: int) -> NoReturn:
        """Carry out a session, in its process."""
        try:
            os.setsid()
            _end_with_parent()
            for other in self.running:
                os.close(other)
            self.orders.close()
            self.results.close()
            os.dup2(0, 2)  # what a session prints is thrown away
            for stop in _STOPS:
                signal.signal(stop, signal.SIG_DFL)
            _limit_memory(self.memory)
            os.environ.update(
                OPENAI_BASE_URL=order["base_url"],
                OPENAI_API_KEY=order["api_key"],
            )
            _seed(order["problem"]["seed"])
            word = json.dumps({"value": self.work.run(order)}, default=_as_number).encode()
            if len(word) > MOST_BYTES:
                word = json.dumps({"error": f"it returned more than {MOST_BYTES} bytes"}).encode()
        except BaseException as error:
            word = json.dumps({"error": self.work.explained(error)}).encode()
        with contextlib.suppress(OSError):
            view = memoryview(word)
            while view:
                view = view[os.write(writer, view) :]
        os._exit(0)

    def _read(self, session: _AgentProcess) -> None:
        """Take what a session says; end it if its process has ended, or if it says too much."""
        # not told by the end of the pipe alone: what the process has forked holds the pipe as well
        is_over = _has_ended(session.pid)
        with contextlib.suppress(BlockingIOError):
            while len(session.said) <= MOST_BYTES:
                said = os.read(session.pipe, 1 << 16)
                session.said += said
                if not said:
                    break
            is_over = True
        if is_over:
            self._end(session)

    def _end(self, session: _AgentProcess) -> None:
        """End the processes of a session, and say how it ended."""
        self.selector.unregister(session.pipe)
        os.close(session.pipe)
        del self.running[session.pipe]
        with contextlib.suppress(OSError):
            os.killpg(session.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):  # it may not have begun a group yet
            os.kill(session.pid, signal.SIGKILL)
        status = 0
        with contextlib.suppress(ChildProcessError):
            status = os.waitstatus_to_exitcode(os.waitpid(session.pid, 0)[1])
        _say(self.results, session.number, status, bytes(session.said))


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, which is not reaped, so that its group is still its own."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # what was loaded has the children reaped
        return True


def _ask_the_policy_without_a_proxy() -> None:
    """Add this machine to the hosts that are asked without a proxy, before a client is made that
    sessions share.
    """
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    hosts = f"{others},127.0.0.1,localhost" if others else "127.0.0.1,localhost"
    if others != "*":  # which stands for all of them
        os.environ.update(NO_PROXY=hosts, no_proxy=hosts)


def _seed(seed: int) -> None:
    """Seed ``random``, and NumPy's global generator if what runs has it: forked processes would
    all draw the same numbers.
    """
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _as_number(value: Any) -> object:  # noqa: ANN401
    """Return a scalar of NumPy or torch as JSON has it."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be returned")


def _limit_memory(memory: int) -> None:
    """Limit what this process, and each that it starts, may have of writable memory of its own:
    what it has now, and ``memory`` bytes. Address space that is only reserved does not count.
    """
    in_use = 0
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm") as file:
        in_use = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (in_use + memory,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(results: BinaryIO, number: int, status: int, said: bytes) -> None:
    with contextlib.suppress(OSError):  # the trainer has ended
        results.write(b"%d %d %d\n" % (number, status, len(said)))
        results.write(said)
        results.flush()


if __name__ == "__main__":
    main()
