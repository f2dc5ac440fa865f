"""Runs untrusted programs: one interface to the strongest isolation that the machine offers.

``bubblewrap`` has user, pid, mount, network and IPC namespaces. ``landlock`` has Landlock, seccomp
and limits, for machines on which user namespaces are switched off. ``unsafe`` has only limits and
must be asked for.

A ``Server`` is a warm interpreter inside the sandbox; ``Server.spawn`` forks a supervised process
from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox import bubblewrap
from megatron_dcpo.sandbox.limits import GRACE_SECONDS, CodeLimits

Level = Literal["bubblewrap", "landlock", "unsafe"]
Role = Literal["program", "checker"]
LEVELS: tuple[Level, ...] = ("bubblewrap", "landlock", "unsafe")
# The modules that programs import most are loaded before the fork, and not again in each program.
_MODULES = (
    "abc argparse array ast atexit bisect calendar cmath collections contextlib copy dataclasses "
    "datetime decimal enum "
    "fractions functools hashlib heapq io itertools json math numbers operator os pprint queue "
    "random re statistics "
    "string struct sys textwrap threading time traceback types typing"
)
_SOURCES = (
    "rpc",
    "isolation",
    "seccomp",
    "standard_files",
    "program",
    "test_runner",
    "fork_server",
)
_START_SECONDS = 60.0

# The modules of guest/ from their sources in ``order``, where this package is not installed.
DEFINE_SOURCES = """
for name in ("megatron_dcpo", "megatron_dcpo.sandbox", "megatron_dcpo.sandbox.guest"):
    sys.modules[name] = types.ModuleType(name); sys.modules[name].__path__ = []
for name, source in order["sources"].items():
    module = types.ModuleType("megatron_dcpo.sandbox.guest." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["megatron_dcpo.sandbox.guest"], name, module)
    exec(compile(source, name + ".py", "exec"), module.__dict__)
"""
# The start-up test: what every level refuses.
_PROBE = """
import os, socket
refused = 0
for attempt in (
    lambda: os.listdir("/root") + os.listdir("/home"),
    lambda: socket.socket(),
    lambda: os.chmod("/usr/lib", 0o755),
    lambda: os.truncate("/usr/lib/none", 0),
):
    try: attempt()
    except OSError: refused += 1
print("refused", refused)
"""
_BOOT = f"""
import json, sys, types, socket
pipe = socket.socket(fileno=4)
data = b""
while chunk := pipe.recv(1 << 20): data += chunk
pipe.close()
order = json.loads(data)
sys.path.extend(order["path"])
{DEFINE_SOURCES}settings = order["settings"]
del pipe, data, chunk, order, source
sys.modules["megatron_dcpo.sandbox.guest.fork_server"].serve(settings)
"""


class SandboxDied(Exception):
    """The sandbox, not the program, has ended: killed from outside, or out of memory. The program
    may be tried again.
    """


@dataclass(frozen=True)
class Ending:
    """How one run of a program ended: its exit code (a negative one is the signal), and the reason
    ``wall`` or ``memory`` if it was ended for that.
    """

    code: int
    reason: str
    cpu: float


class Server:
    """A warm interpreter in a sandbox. Not thread-safe; start it and use it in one thread, which
    must outlive it: bubblewrap ends with the thread that started it.
    """

    def __init__(self, level: Level, role: Role = "program") -> None:
        self.level = level
        self.role = role
        self.control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sources, boot = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with server_end, boot, sources:
            self.process = _popen(level=level, role=role, control=server_end, boot=boot)
            boot.close()
            server_end.close()
            try:
                sources.sendall(json.dumps(_order(level, role)).encode())
                sources.close()
                ready = receive(self.control, _START_SECONDS)
            except (OSError, SandboxDied, TimeoutError):
                ready = None
        if ready != "ready":
            self.process.kill()
            assert self.process.stderr is not None
            complaint = self.process.stderr.read(4000).decode(errors="replace").strip().splitlines()
            self.close()
            raise SandboxDied(complaint[-1] if complaint else f"no answer from the {level} sandbox")

    def spawn(self, limits: CodeLimits, *pipes: int) -> socket.socket:
        """Fork a process that owns ``pipes``; the channel to it."""
        channel, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            socket.send_fds(
                self.control, [json.dumps(limits.message()).encode()], [child_end.fileno(), *pipes]
            )
        except OSError as error:
            channel.close()
            raise SandboxDied(str(error)) from None
        finally:
            child_end.close()
        return channel

    def close(self) -> None:
        """End the server and everything in it."""
        self.control.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def alive(self) -> bool:
        return self.process.poll() is None


@contextlib.contextmanager
def in_memory(data: bytes = b"") -> Iterator[int]:
    """Open a file in memory that holds ``data``; yield its descriptor, positioned at the start."""
    descriptor = os.memfd_create("data", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def receive(channel: socket.socket, seconds: float) -> Any:  # noqa: ANN401 - JSON of any shape
    """Receive one message. Raises SandboxDied if the other side is gone, TimeoutError if nothing
    comes.
    """
    if not select.select([channel], [], [], max(0.0, seconds))[0]:
        raise TimeoutError
    try:
        data = channel.recv(1 << 16)
    except OSError as error:
        raise SandboxDied(str(error)) from None
    if not data:
        raise SandboxDied("closed")
    return json.loads(data)


def start_run(channel: socket.socket, wall: float, *pipes: int, group: int | None = None) -> None:
    """Start the task of a channel once, with stdin, stdout, stderr and perhaps the pipe between
    program and tests. ``group`` is the open ``cgroup.procs`` of the control group that it joins.
    """
    message = {"wall": wall, "group": group is not None}
    try:
        socket.send_fds(
            channel, [json.dumps(message).encode()], [*pipes, *([] if group is None else [group])]
        )
    except OSError as error:
        raise SandboxDied(str(error)) from None


def end_of_run(channel: socket.socket, seconds: float, grace: float = GRACE_SECONDS) -> Ending:
    """Wait for the end of the run that was started. Raises SandboxDied; without ``grace``,
    TimeoutError.
    """
    return Ending(**message_of_run(channel, seconds, grace))


def message_of_run(
    channel: socket.socket, seconds: float, grace: float = GRACE_SECONDS
) -> dict[str, Any]:
    """Return the message at the end of a run: how it ended or, from tests, their verdict."""
    try:
        message: dict[str, Any] = receive(channel, seconds + grace)
    except TimeoutError:
        if not grace:
            raise
        raise SandboxDied("the supervisor does not answer") from None
    if "failed" in message:
        raise SandboxDied(message["failed"])
    return message


@contextlib.contextmanager
def running_tests(
    server: Server, limits: CodeLimits, tests: dict[str, Any], pipe: int
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Start the tests of a program that answers on ``pipe``, in a process of ``server``, whose role
    is ``checker``. Yields a function that waits for their verdict (``category``, ``detail``) and
    raises SandboxDied.
    """
    with contextlib.ExitStack() as stack:
        task = stack.enter_context(in_memory(json.dumps(tests).encode()))
        empty, complaints = (stack.enter_context(in_memory()) for _ in range(2))
        channel = stack.enter_context(server.spawn(limits, task))
        start_run(channel, limits.program_seconds, empty, empty, complaints, pipe)

        def wait() -> dict[str, Any]:
            message = message_of_run(channel, limits.program_seconds)
            if "category" in message:
                return message
            ending = Ending(**message)
            if ending.reason == "wall":
                return {
                    "category": "timeout",
                    "detail": f"the tests took more than {limits.program_seconds:g} s",
                }
            if ending.code in (-signal.SIGPROF, -signal.SIGXCPU):
                detail = (
                    f"the tests worked more than {limits.test_seconds:g} s on what the program "
                    "returned"
                )
                return {"category": "timeout", "detail": detail}
            if ending.code == -signal.SIGKILL:
                raise SandboxDied("the process of the tests was killed")
            return {
                "category": "wrong",
                "detail": f"the tests ended with {ending.code}: {last_line(complaints)}",
            }

        yield wait


def last_line(descriptor: int) -> str:
    """Return the last line of a file, at most 300 characters."""
    size = os.fstat(descriptor).st_size
    lines = (
        os.pread(descriptor, 2000, max(0, size - 2000))
        .decode(errors="replace")
        .strip()
        .splitlines()
    )
    return lines[-1][:300] if lines else ""


def choose(sandbox: str) -> Level:
    """Return the level for ``auto`` or a level's name, after a start-up test. Raises UserError if
    the level does not work.
    """
    if sandbox == "unsafe":
        return "unsafe"
    if sandbox in ("bubblewrap", "landlock"):
        problem = problem_of(sandbox)  # type: ignore[arg-type]
        if problem:
            raise UserError(f"sandbox {sandbox} does not work here: {problem}")
        return sandbox  # type: ignore[return-value]
    if sandbox != "auto":
        raise UserError(f"sandbox {sandbox!r}: must be auto, bubblewrap, landlock, or unsafe")
    problems = {}
    for level in ("bubblewrap", "landlock"):
        problem = problem_of(level)  # type: ignore[arg-type]
        if not problem:
            return level  # type: ignore[return-value]
        problems[level] = problem
    raise UserError(
        "no sandbox for untrusted programs works here ("
        + "; ".join(f"{level}: {problem}" for level, problem in problems.items())
        + "); install bubblewrap (apt-get install bubblewrap), "
        "or type --sandbox unsafe to run without one"
    )


@functools.cache
def problem_of(level: Level) -> str:
    """Return why ``level`` does not work on this machine; empty when it does: a program was run and
    confined.
    """
    if level == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed (apt-get install bubblewrap)"
    try:
        server = Server(level)
    except (SandboxDied, OSError) as error:
        return str(error)
    try:
        job = json.dumps({"program": _PROBE}).encode()
        with in_memory(job) as task, in_memory() as empty, in_memory() as out, in_memory() as err:
            channel = server.spawn(CodeLimits(), task)
            with channel:
                start_run(channel, 20.0, empty, out, err)
                ending = end_of_run(channel, 20.0)
            printed = os.pread(out, 100, 0).decode(errors="replace").strip()
            complaint = os.pread(err, 1000, 0).decode(errors="replace").strip()
            if ending.code or printed != "refused 4":
                ended = f"the test program ended with {ending.code}: {printed}"
                return complaint.splitlines()[-1] if complaint else ended
            return ""
    except (SandboxDied, OSError) as error:
        return str(error)
    finally:
        server.close()


def _order(level: Level, role: Role) -> dict[str, Any]:
    """Return what the server is told at its start: its sources and settings."""
    here = Path(__file__).parent / "guest"
    site = bubblewrap.site_packages()
    return {
        "sources": {name: (here / f"{name}.py").read_text(encoding="utf-8") for name in _SOURCES},
        "path": ["/packages"] if level == "bubblewrap" else [site],
        "settings": {
            "level": level,
            "role": role,
            "modules": [*_MODULES.split(), *(["numpy"] if role == "checker" else [])],
            "readable": [
                *{sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")},
                f"{bubblewrap.stdlib()}/lib-dynload",
                *(f"{site}/{name}" for name in bubblewrap.PACKAGES),
                *filter(os.path.isdir, ("/usr/lib", "/usr/lib64", "/lib", "/lib64")),
            ],
            "listable": [site],
        },
    }


def _popen(
    level: Level, role: Role, control: socket.socket, boot: socket.socket
) -> subprocess.Popen[bytes]:
    """Start the interpreter with the two sockets as 3 and 4."""
    python = os.path.realpath(sys.executable)
    interpreter = [python, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT]
    if level == "bubblewrap":
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxDied("bwrap is not installed (apt-get install bubblewrap)")
        interpreter = bubblewrap.command_line(bwrap, python, interpreter, role)
    environment = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    start = f"""
import os
os.dup2({control.fileno()}, 503); os.dup2({boot.fileno()}, 504)
os.dup2(503, 3); os.dup2(504, 4); os.closerange(5, 600)
try:
    with open("/proc/self/oom_score_adj", "w") as stream: stream.write("1000")
except OSError: pass
os.execve({interpreter[0]!r}, {interpreter!r}, {environment!r})
"""
    return subprocess.Popen(
        [python, "-I", "-S", "-c", start],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[control.fileno(), boot.fileno()],
        env={"PATH": "/usr/bin:/bin"},
        cwd="/",
    )


def remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
