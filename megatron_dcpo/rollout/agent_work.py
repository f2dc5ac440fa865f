"""What the session of an agent runs, in its process: a function of the user's, or a command
(``agent_host.py`` starts it). Nothing here needs more than the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import selectors
import shlex
import socket
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_TAIL_BYTES = 1 << 20  # of what a command prints
_LOOK_SECONDS = 0.5
_SHOWN = 300
_PROBLEM = "DCPO_PROBLEM"
_WARM_UP_SECONDS = 10.0
_STDLIB = sysconfig.get_path("stdlib")
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


class AgentError(Exception):
    """A session has failed, or an agent cannot be loaded; the message is complete as it is."""


def explained(error: BaseException) -> str:
    """Return why a session has failed, or why an agent cannot be loaded: an exception on one line,
    with the innermost line of the user's own file, or else the innermost outside this one.
    """
    text = " ".join(str(error).split())[:_SHOWN]
    if isinstance(error, AgentError):
        return text
    text = f"{type(error).__name__}: {text}"
    frames = []
    users = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in (__file__, str(Path(__file__).with_name("agent_host.py"))):
            continue
        frames.append(frame)
        is_library = "site-packages" in frame.filename or frame.filename.startswith(("<", _STDLIB))
        if not is_library:
            users.append(frame)
    for frame in (users or frames)[-1:]:
        text += f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return text


def load(kind: str, text: str) -> Callable[[dict[str, Any]], object]:
    """Return what a session runs: a function of its order. Raises what importing it raises, and
    :class:`AgentError`.
    """
    return load_agent(text) if kind == "agent" else load_command(text)


def load_agent(path: str) -> Callable[[dict[str, Any]], object]:
    """Return what a session of the function at ``path`` runs."""
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise AgentError("expected file.py:name or package.module:name")
    module = _load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    function = getattr(module, name, None)
    if function is None:
        raise AgentError(f"{source} has no {name!r}")
    try:
        inspect.signature(function).bind("problem", "client")
    except TypeError as error:
        raise AgentError(f"expected a function (problem, client): {error}") from None
    client = _shared_client()
    return lambda order: run_function(function, client, order)


def _load_file(file: Path) -> Any:  # noqa: ANN401 -- a module
    if not file.is_file():
        raise AgentError(f"no such file {file}")
    # a name that no other module has
    spec = importlib.util.spec_from_file_location(f"agent_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


def load_command(text: str) -> Callable[[dict[str, Any]], object]:
    """Return what a session of a command runs."""
    words = shlex.split(text)
    return lambda order: run_command(words, order)


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
    lines = output.strip().splitlines()  # of bytes: a text in JSON may hold Unicode's line ends
    if not lines:
        return None
    try:
        value = json.loads(lines[-1].decode(errors="replace"))
    except ValueError:
        return None
    return value if isinstance(value, dict) and "score" in value else None


def _communicate(process: subprocess.Popen[bytes], text: bytes) -> tuple[bytes, bytes]:
    """Give a process its input; return the ends of what it prints on both its outputs, until it
    has ended: what it has started may hold them open.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    tails = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    rest = memoryview(text)
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        os.set_blocking(process.stdin.fileno(), False)
        while selector.get_map():
            has_ended = process.poll() is not None
            ready = selector.select(0.0 if has_ended else _LOOK_SECONDS)
            if has_ended and not ready:
                break
            for key, _ in ready:
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
                tail = tails[key.fd]
                tail += printed
                if len(tail) > 2 * _TAIL_BYTES:
                    del tail[:-_TAIL_BYTES]
                if not printed:
                    selector.unregister(key.fileobj)
    process.wait()
    output, errors = (bytes(tail[-_TAIL_BYTES:]) for tail in tails.values())
    return output, errors
