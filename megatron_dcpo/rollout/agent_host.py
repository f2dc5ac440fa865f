"""The process that starts agents: one process for each session, forked from this one, in which the
agent's module is imported once. Started by ``agents.py``, never by hand.

A JSON object per line on stdin says ``start`` or ``kill``; one per line on stdout says how a
session ended. A session's process has a group of its own, and limits of memory and time. When stdin
ends, everything ends. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import inspect
import json
import os
import random
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, NoReturn

from megatron_dcpo.runtime.plugins import load_object, raised

OPTION = "rollout.agent"
MOST_BYTES = 1 << 20  # of what an agent returns
_TAIL_BYTES = 1 << 16  # of what a command prints
_SHOWN = 300
_LOOK_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
_PROBLEM = "DCPO_PROBLEM"
_WARM_UP_SECONDS = 10.0
_A_REPLY = {
    "id": "-",
    "object": "chat.completion",
    "created": 0,
    "model": "-",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "-"}}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
_LONGEST_VARIABLE = 100_000  # bytes; Linux takes 128 KiB


class Client(NamedTuple):
    """What an agent gets where the package ``openai`` is not installed."""

    base_url: str
    api_key: str


@dataclass
class _AgentProcess:
    """The process of a session, and what it has said of its result."""

    number: int
    pid: int
    pipe: int
    deadline: float
    said: bytearray = field(default_factory=bytearray)
    killed: str = ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--memory", type=int, required=True, help="bytes beyond the imports")
    parser.add_argument("--agent", default="")
    parser.add_argument("--command", default="[]", help="a JSON list of words")
    options = parser.parse_args()
    # nothing that an agent's module prints may be taken for a result
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # for the trainer only
        signal.signal(stop, signal.SIG_IGN)
    try:
        run = _runner(options.agent, json.loads(options.command))
    except BaseException as error:
        _say(results, {"error": f"{error}" if options.agent else raised(error)})
        return
    _say(results, {"ready": True})
    Host(run, orders, results, options.seconds, options.memory).serve()


def _runner(agent: str, command: list[str]) -> Callable[[dict[str, Any]], object]:
    """Return the function that carries out a session in its own process."""
    if not agent:
        return lambda order: run_command(command, order)
    function = load_object(agent, OPTION)
    client = _shared_client()
    return lambda order: run_function(function, client, order)


class Host:
    """Starts sessions, watches them, and says how they ended."""

    def __init__(
        self,
        run: Callable[[dict[str, Any]], object],
        orders: BinaryIO,
        results: BinaryIO,
        seconds: float,
        memory: int,
    ) -> None:
        self.run = run
        self.orders = orders
        self.results = results
        self.seconds = seconds
        self.memory = memory
        self.running: dict[int, _AgentProcess] = {}  # by their pipes
        self.selector = selectors.DefaultSelector()
        self.selector.register(orders, selectors.EVENT_READ)
        self.received = bytearray()

    def serve(self) -> None:
        """Carry out orders until there are no more, then end all sessions."""
        is_open = True
        while is_open:
            for key, _ in self.selector.select(self._pause()):
                if key.fileobj is self.orders:
                    is_open = self._take_orders()
                elif key.fd in self.running:  # it may just have been ended
                    self._read(self.running[key.fd])
            now = time.monotonic()
            for session in list(self.running.values()):
                if session.deadline < now and not session.killed:
                    self._kill(session, f"it took more than {self.seconds:g} seconds")
        for session in list(self.running.values()):
            self._kill(session, "the run ends")

    def _pause(self) -> float:
        soonest = min((one.deadline for one in self.running.values()), default=None)
        if soonest is None:
            return _LOOK_SECONDS
        return min(_LOOK_SECONDS, max(0.0, soonest - time.monotonic()))

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
                        self._kill(session, "it was given up")
            else:
                self._start(order)
        return True

    def _start(self, order: dict[str, Any]) -> None:
        reader, writer = os.pipe()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(reader)
            os.close(writer)
            _say(self.results, {"id": order["id"], "error": f"no process: {error.strerror}"})
            return
        if pid == 0:
            self._in_session(order, writer)
        os.close(writer)
        os.set_blocking(reader, False)
        deadline = time.monotonic() + self.seconds
        session = _AgentProcess(number=order["id"], pid=pid, pipe=reader, deadline=deadline)
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
            for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                signal.signal(stop, signal.SIG_DFL)
            _limit_memory(self.memory)
            os.environ.update(
                OPENAI_BASE_URL=order["base_url"],
                OPENAI_API_KEY=order["api_key"],
                NO_PROXY="127.0.0.1,localhost",
                no_proxy="127.0.0.1,localhost",
            )
            random.seed(order["problem"]["seed"])
            word = json.dumps({"value": self.run(order)}).encode()
            if len(word) > MOST_BYTES:
                word = json.dumps({"error": f"it returned more than {MOST_BYTES} bytes"}).encode()
        except BaseException as error:
            word = json.dumps({"error": f"{error}" if _is_ours(error) else raised(error)}).encode()
        with contextlib.suppress(OSError):
            view = memoryview(word)
            while view:
                view = view[os.write(writer, view) :]
        os._exit(0)

    def _read(self, session: _AgentProcess) -> None:
        try:
            said = os.read(session.pipe, 1 << 16)
        except BlockingIOError:
            return
        session.said += said
        if said and len(session.said) <= MOST_BYTES:
            return
        self._end(session)

    def _kill(self, session: _AgentProcess, why: str) -> None:
        session.killed = why
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
            status = os.waitpid(session.pid, 0)[1]
        _say(self.results, {"id": session.number, **_result_of(session, status)})


def _result_of(session: _AgentProcess, status: int) -> dict[str, Any]:
    if session.killed:
        return {"error": session.killed}
    try:
        result = json.loads(session.said)
    except ValueError:
        ended = f"signal {status & 127}" if status & 127 else f"status {status >> 8}"
        return {"error": f"its process ended with {ended} and no result"}
    return dict(result)


class AgentError(Exception):
    """A session has failed, and the words say all of it."""


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, AgentError)


# ------------------------------------------------------------------------- in a session's process


def _shared_client() -> Any:  # noqa: ANN401 -- of openai
    """Return a client of OpenAI's package that a session copies with its address and key, None
    where the package is not installed.
    """
    try:
        import openai
    except ImportError:
        return None
    with contextlib.suppress(Exception):  # it only saves time
        _warm_up(openai)
    return openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="-", timeout=24 * 3600.0)


def _warm_up(openai: Any) -> None:  # noqa: ANN401
    """Ask once for a chat, of a server for this one question: what a client imports and builds
    only then would take a tenth of a second in each session.
    """
    reply = json.dumps(_A_REPLY).encode()
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_WARM_UP_SECONDS)

        def answer() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    length = f"Content-Length: {len(reply)}\r\n\r\n"
                    connection.sendall(f"{head}{length}".encode() + reply)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/v1"

        async def ask() -> None:
            client = openai.AsyncOpenAI(
                base_url=address, api_key="-", max_retries=0, timeout=_WARM_UP_SECONDS
            )
            async with client:
                await client.chat.completions.create(
                    model="-", messages=[{"role": "user", "content": "-"}]
                )

        try:
            asyncio.run(ask())
        finally:
            thread.join()


def run_function(function: Any, client: Any, order: dict[str, Any]) -> object:  # noqa: ANN401
    """Return what an agent's function returns."""
    base_url, api_key = order["base_url"], order["api_key"]
    if client is None:
        mine: Any = Client(base_url, api_key)
    else:
        mine = client.with_options(base_url=base_url, api_key=api_key)
    result = function(order["problem"], mine)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    return result


async def _awaited(result: Any) -> object:  # noqa: ANN401
    return await result


def run_command(command: list[str], order: dict[str, Any]) -> object:
    """Return the verdict that a command's last line of output is, a JSON object with a ``score``,
    None if it is none. The problem is on its stdin, and in the environment if it fits. Raises
    :class:`AgentError`.
    """
    problem = json.dumps(order["problem"])
    environment = dict(os.environ)
    if len(problem.encode()) <= _LONGEST_VARIABLE:
        environment[_PROBLEM] = problem
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        raise AgentError(f"{command[0]}: {error.strerror}") from None
    output, errors = _communicate(process, problem.encode() + b"\n")
    if process.returncode:
        ended = f"status {process.returncode}"
        if process.returncode < 0:
            ended = f"signal {-process.returncode}"
        words = " ".join(errors.decode(errors="replace").split())[-_SHOWN:]
        raise AgentError(f"it ended with {ended}: {words}")
    lines = output.decode(errors="replace").strip().splitlines()
    if not lines:
        return None
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return None
    return value if isinstance(value, dict) and "score" in value else None


def _communicate(process: subprocess.Popen[bytes], text: bytes) -> tuple[bytes, bytes]:
    """Give a process its input; return the ends of what it prints on both its outputs."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    tails = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    rest = memoryview(text)
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        os.set_blocking(process.stdin.fileno(), False)
        while selector.get_map():
            for key, _ in selector.select():
                if key.fileobj is process.stdin:
                    try:
                        rest = rest[os.write(key.fd, rest[:4096]) :]
                    except OSError:  # it does not read it
                        rest = rest[:0]
                    if not rest:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                printed = os.read(key.fd, 1 << 16)
                tails[key.fd] = (tails[key.fd] + printed)[-_TAIL_BYTES:]
                if not printed:
                    selector.unregister(key.fileobj)
    process.wait()
    output, errors = tails.values()
    return output, errors


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


def _say(results: BinaryIO, word: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the trainer has ended
        results.write(json.dumps(word).encode() + b"\n")


if __name__ == "__main__":
    main()
