"""The warm server of a sandbox: it holds an interpreter with the usual modules loaded and forks one process per program.

Level ``bubblewrap``: the server is inside bubblewrap already; each program gets user, pid, mount and IPC namespaces of
its own within. The first process of the pid namespace (the supervisor, which the program can neither trace, read nor
signal) starts the program once per test and kills everything in the namespace after each. Level ``landlock``: the
program's process may start no other and reach no other. Level ``unsafe``: limits only.

The server and the supervisor hold no expected values: what is forked from them has a copy of their memory.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any

from megatron_dcpo.sandbox.guest import isolation, rpc
from megatron_dcpo.sandbox.guest.program import run_program

CONTROL = 3  # the descriptor of the pipe to the judge
POLL_SECONDS = 0.05  # how often the memory of all processes of a program is added up
MAX_FILES = 64


def serve(settings: dict[str, Any]) -> None:
    """Fork for every message until the judge is gone."""
    settings["shared"] = _places(settings)
    _become_ordinary(settings)
    for name in settings["modules"]:
        with contextlib.suppress(ImportError):
            __import__(name)
    control = socket.socket(fileno=CONTROL)
    gc.collect()
    gc.freeze()  # a collection in a forked process would touch, and so copy, every page of these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.send(b'"ready"')
    while True:
        message, pipes, _, _ = socket.recv_fds(control, 65536, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            _child(json.loads(message), pipes, settings)
        for pipe in pipes:
            os.close(pipe)


def _child(limits: dict[str, Any], pipes: list[int], settings: dict[str, Any]) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(CONTROL)
        os.setsid()
        isolation.die_with_parent()
        if settings["role"] == "checker":
            from megatron_dcpo.sandbox.guest.test_runner import run_checks

            run_checks(pipes[0], pipes[1], pipes[2], limits)
        elif settings["level"] == "bubblewrap":
            _in_namespaces(pipes, limits, settings)
        else:
            _supervise(pipes, limits, settings)
    except BaseException as error:
        message = {"failed": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):
            socket.socket(fileno=pipes[0]).send(json.dumps(message).encode())
    finally:
        os._exit(0)


def _in_namespaces(pipes: list[int], limits: dict[str, Any], settings: dict[str, Any]) -> None:
    isolation.map_own_user()
    first = os.fork()
    if first:
        for pipe in pipes:
            os.close(pipe)
        os.waitpid(first, 0)
        return
    isolation.die_with_parent()
    isolation.set_dumpable(False)
    isolation.private_mounts(limits["scratch_bytes"])
    os.chdir("/tmp")
    _supervise(pipes, limits, settings)


def _supervise(pipes: list[int], limits: dict[str, Any], settings: dict[str, Any]) -> None:
    """Run the program once per message ``{"wall": seconds}`` with its descriptors; answer how it ended."""
    channel = socket.socket(fileno=pipes[0])
    with open(pipes[1], "rb") as stream:
        job = json.loads(stream.read())
    base = _resident("self")
    while True:
        message, given, _, _ = socket.recv_fds(channel, 65536, 4)
        if not message:
            return
        wall = float(json.loads(message)["wall"])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if child == 0:
            _program(job, given, limits, settings)
        for pipe in given:
            os.close(pipe)
        ending = _watch(child, channel, wall, limits["memory_bytes"], base, settings)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        ending["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        channel.send(json.dumps(ending).encode())


def _watch(
    child: int, channel: socket.socket, wall: float, memory: int, base: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """Wait for the end of ``child``, for its time, for too much memory, or for the judge to lose interest."""
    alone = settings["level"] != "bubblewrap"
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLIN)
    deadline = time.monotonic() + wall
    reason = ""
    while not reason:
        left = deadline - time.monotonic()
        if left <= 0:
            reason = "wall"
            break
        events = poll.poll(1000 * min(left, POLL_SECONDS))
        if any(pipe == handle for pipe, _ in events):
            break
        if events:
            reason = "cancelled"
        elif not alone and _resident_of_all(base) > memory:
            reason = "memory"
    os.close(handle)
    if alone:
        os.kill(child, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in the pid namespace but its first process, which is this one
    status = os.waitpid(child, 0)[1]
    _reap()
    return {"code": os.waitstatus_to_exitcode(status), "reason": reason}


def _reap() -> None:
    try:
        while os.waitpid(-1, 0)[0]:
            pass
    except ChildProcessError:
        pass


def _resident(process: str) -> int:
    try:
        with open(f"/proc/{process}/statm", "rb") as stream:
            return int(stream.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def _resident_of_all(base: int) -> int:
    """Bytes in memory of the namespace's processes, without what each shares with the supervisor."""
    return sum(max(0, _resident(name) - base) for name in os.listdir("/proc") if name.isdigit() and name != "1")


def _program(job: dict[str, Any], given: list[int], limits: dict[str, Any], settings: dict[str, Any]) -> None:
    """The program's own process: put its descriptors in place, give everything up, run."""
    try:
        if settings["level"] == "bubblewrap":
            isolation.set_dumpable(True)
        isolation.die_with_parent()
        os.setsid()
        keep = _arrange(given, settings)
        _limit(limits, settings)
        isolation.no_new_privileges()
        if settings["level"] == "bubblewrap":
            isolation.drop_capabilities()
        if settings["level"] == "landlock":
            isolation.landlock(settings["shared"]["readable"], settings["shared"]["listable"], ["/dev/null"])
        if settings["level"] != "unsafe" and isolation.seccomp_supported():
            isolation.seccomp(alone=settings["level"] == "landlock")
        for name, value in (("PATH", "/usr/bin:/bin"), ("HOME", "/tmp"), ("LANG", "C.UTF-8")):
            os.environ[name] = value
    except BaseException as error:
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
        os._exit(rpc.EXIT_SANDBOX)
    run_program(job, calls=3 if keep else None, message_bytes=limits["output_bytes"])


def _arrange(given: list[int], settings: dict[str, Any]) -> bool:
    """stdin, stdout, stderr and the pipe of the tests become 0 to 3; everything else is closed."""
    high = [os.dup2(pipe, 500 + place) for place, pipe in enumerate(given)]
    for place, pipe in enumerate(high):
        os.dup2(pipe, place)
    kept = sorted(settings["shared"]["descriptors"])
    start = len(given)
    for pipe in kept:
        os.closerange(start, pipe)
        start = pipe + 1
    os.closerange(start, 1024)
    return len(given) > 3


def _limit(limits: dict[str, Any], settings: dict[str, Any]) -> None:
    cpu = int(limits["cpu_seconds"])
    isolation.limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    isolation.limit(resource.RLIMIT_AS, limits["memory_bytes"])
    isolation.limit(resource.RLIMIT_FSIZE, limits["output_bytes"])
    isolation.limit(resource.RLIMIT_CORE, 0)
    isolation.limit(resource.RLIMIT_NOFILE, MAX_FILES + 16 * len(settings["shared"]["descriptors"]))
    isolation.limit(resource.RLIMIT_MEMLOCK, 0)
    isolation.limit(resource.RLIMIT_MSGQUEUE, 0)
    if settings["level"] != "unsafe":
        isolation.limit(resource.RLIMIT_NPROC, limits["processes"] + settings["shared"]["processes"])


def _places(settings: dict[str, Any]) -> dict[str, Any]:
    """What a program under Landlock may read, opened while this process still can: it may have been started by root
    with a Python that no other user reaches. ``sys.path`` then goes through the open descriptors."""
    if settings["level"] != "landlock":
        return {"descriptors": [], "readable": [], "listable": [], "processes": 0}
    opened: dict[str, int] = {}
    for name in [*settings["readable"], *settings["listable"]]:
        if name not in opened and os.path.isdir(name):
            descriptor = os.open(name, os.O_PATH)
            opened[name] = os.dup2(descriptor, 900 + len(opened))
            os.close(descriptor)
    if os.geteuid() == 0:
        sys.path[:] = [f"/proc/self/fd/{opened[name]}" for name in sys.path if name in opened]
        sys.path_importer_cache.clear()
    return {
        "descriptors": list(opened.values()),
        "readable": [opened[name] for name in settings["readable"] if name in opened],
        "listable": [opened[name] for name in settings["listable"] if name in opened],
        "processes": _own_processes(),
    }


def _own_processes() -> int:
    """Processes and threads of this user, which count against its limit of processes."""
    user, count = (65534 if os.geteuid() == 0 else os.geteuid()), 64  # other sandboxes come and go
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return count


def _become_ordinary(settings: dict[str, Any]) -> None:
    """For root no limit of processes holds, and file permissions do not count."""
    if settings["level"] != "unsafe" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    os.chdir("/")
