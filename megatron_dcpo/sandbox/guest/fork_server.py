"""The warm server of a sandbox: it holds an interpreter with the usual modules loaded and forks one
process per task.

A task is a program, or the tests of one (in a server of role ``checker``). Its supervisor, which it
can neither trace, read, signal nor limit, runs it once per message. At level ``bubblewrap`` the
server is inside bubblewrap; each program gets user, pid, mount and IPC namespaces within, and
everything in them is killed after each run. At level ``landlock``, and for tests at every level,
the process may start no other process and reach none. At level ``unsafe`` there are only limits.

The server and the supervisor hold no expected values, because their forks have a copy of their
memory.
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

from megatron_dcpo.sandbox.guest import isolation, seccomp
from megatron_dcpo.sandbox.guest.program import run_program

CONTROL = 3  # the descriptor of the pipe to the judge
POLL_SECONDS = 0.05  # how often the memory of all processes of a program is added up
MAX_FILES = 64


def serve(settings: dict[str, Any]) -> None:
    """Fork for every message until the judge is gone."""
    settings["shared"] = _places(settings)
    settings["server"] = os.getpid()
    _become_ordinary(settings)
    for name in settings["modules"]:
        with contextlib.suppress(ImportError):
            __import__(name)
    if seccomp.supported():
        settings["filter"] = _filter(settings)
        seccomp.common_part(*settings["filter"])
    control = socket.socket(fileno=CONTROL)
    gc.collect()
    # a collection in a forked process would touch, and so copy, every page of these objects
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    checker = settings["role"] == "checker"
    if not checker:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    control.send(b'"ready"')
    while True:
        message, pipes, _, _ = socket.recv_fds(control, 65536, 4)
        if not message:
            os._exit(0)
        if checker:  # one at a time, and no program is near: this process is the supervisor
            _supervise(pipes=pipes, limits=json.loads(message), settings=settings, processes=None)
        elif os.fork() == 0:
            _child(json.loads(message), pipes, settings)
        for pipe in pipes:
            os.close(pipe)


def _child(limits: dict[str, Any], pipes: list[int], settings: dict[str, Any]) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.close(CONTROL)
        os.setsid()
        isolation.die_with_parent(settings["server"])
        if settings["level"] == "bubblewrap":
            _in_namespaces(pipes, limits, settings)
        else:
            _supervise(pipes=pipes, limits=limits, settings=settings, processes=None)
    except BaseException as error:
        _answer(socket.socket(fileno=pipes[0]), {"failed": f"{type(error).__name__}: {error}"})
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
    isolation.die_with_parent(0)  # which this namespace does not show
    isolation.set_dumpable(False)
    processes = isolation.private_mounts(limits["scratch_bytes"])
    os.chdir("/tmp")
    _supervise(pipes=pipes, limits=limits, settings=settings, processes=processes)


def _supervise(
    pipes: list[int], limits: dict[str, Any], settings: dict[str, Any], processes: int | None
) -> None:
    """Run the task once per message ``{"wall": seconds}`` with its descriptors, and answer how it
    ended.

    ``processes`` is the /proc of a namespace in which this process is the first; None if the task
    is a single process.
    """
    channel = socket.socket(fileno=os.dup(pipes[0]))
    while True:
        data = b""
        passed = list[int]()
        with contextlib.suppress(ConnectionResetError):  # closed before the last ending was read
            data, passed, _, _ = socket.recv_fds(channel, 65536, 6)
        if not data:
            channel.close()
            return
        message = json.loads(data)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        parent = os.getpid()
        failures, failed = os.pipe()
        child = os.fork()
        if child == 0:
            if settings["role"] == "checker":
                passed[1] = (
                    channel.fileno()
                )  # for the verdict, which need not wait for the process to end
            _run(
                task_file=pipes[1],
                passed=passed,
                failed=failed,
                grouped=message.get("group", False),
                parent=parent,
                limits=limits,
                settings=settings,
            )
        for pipe in (*passed, failed):
            os.close(pipe)
        ending = _watch(
            child=child,
            channel=channel,
            wall=float(message["wall"]),
            memory=limits["memory_bytes"],
            processes=processes,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        ending["cpu"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if failure := os.read(failures, 1000):
            ending = {"failed": failure.decode(errors="replace")}
        os.close(failures)
        _answer(channel, ending)


def _answer(channel: socket.socket, ending: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the judge may have lost interest
        channel.send(json.dumps(ending).encode())


def _watch(
    child: int, channel: socket.socket, wall: float, memory: int, processes: int | None
) -> dict[str, Any]:
    """Wait for the end of ``child``, for its time, for too much memory, or for the judge to lose
    interest.
    """
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(channel, select.POLLIN)
    deadline = time.monotonic() + wall
    socket_bytes = 0 if processes is None else _largest_socket()
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
        elif processes is not None:
            used = _memory_of_all(processes=processes, limit=memory, socket_bytes=socket_bytes)
            if used > memory:
                reason = "memory"
    os.close(handle)
    if processes is None:
        os.kill(child, signal.SIGKILL)
    else:
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                -1, signal.SIGKILL
            )  # everything in the pid namespace but its first process, which is this one
    status = os.waitpid(child, 0)[1]
    _reap()
    return {"code": os.waitstatus_to_exitcode(status), "reason": reason}


def _reap() -> None:
    try:
        while os.waitpid(-1, 0)[0]:
            pass
    except ChildProcessError:
        pass


def _memory_of_all(processes: int, limit: int, socket_bytes: int) -> int:
    """Return the bytes in memory of the namespace's processes but the first, and ``socket_bytes``
    for every socket that they hold. Where the plain sum passes ``limit``, pages that several
    processes share count once (their proportional size; a process that hides it counts whole).
    """
    names = [name for name in os.listdir(processes) if name.isdigit() and name != "1"]
    live_threads = [_living_thread(processes, name) for name in names]
    of_sockets = socket_bytes * len(_sockets(processes, live_threads))
    total = sum(_resident(processes, thread_dir) for thread_dir in live_threads)
    if total + of_sockets <= limit:
        return total + of_sockets
    return of_sockets + sum(_proportional(processes, thread_dir) for thread_dir in live_threads)


def _living_thread(processes: int, name: str) -> str:
    """Return the place in ``processes`` that tells about the process ``name``: its own, or that of
    a further thread if its first one has ended, because its own then shows no memory and no files.
    """
    if _resident(processes, name):
        return name
    for thread in _listed(processes, f"{name}/task"):
        thread_dir = f"{name}/task/{thread}"
        if _resident(processes, thread_dir):
            return thread_dir
    return name


def _sockets(processes: int, live_threads: list[str]) -> set[str]:
    """Return the sockets that processes hold, each once however many hold it."""
    found = set()
    for thread_dir in live_threads:
        for descriptor in _listed(processes, f"{thread_dir}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"{thread_dir}/fd/{descriptor}", dir_fd=processes)
                if target.startswith("socket:"):
                    found.add(target)
    return found


def _largest_socket() -> int:
    """Return the most bytes that the kernel keeps unread for a socket: the send buffer of its peer,
    which may be closed, and the last piece sent, which may pass the buffer's end by half its size.
    """
    ends = socket.socketpair()
    with ends[0], ends[1]:
        buffer = ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return buffer + buffer // 2


def _resident(processes: int, thread_dir: str) -> int:
    try:
        return int(_read(processes, f"{thread_dir}/statm").split()[1]) * resource.getpagesize()
    except (OSError, IndexError, ValueError):
        return 0


def _proportional(processes: int, thread_dir: str) -> int:
    try:
        lines = _read(processes, f"{thread_dir}/smaps_rollup").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(b"Pss:"))
    except (OSError, StopIteration, IndexError, ValueError):
        return _resident(processes, thread_dir)


def _listed(folder: int, name: str) -> list[str]:
    """Return the names in a directory, none if it is gone."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    except OSError:
        return []
    try:
        return os.listdir(descriptor)
    except OSError:
        return []
    finally:
        os.close(descriptor)


def _read(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY, dir_fd=folder)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _run(
    task_file: int,
    passed: list[int],
    failed: int,
    grouped: bool,
    parent: int,
    limits: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Run in the program's, or the tests', own process: put its descriptors in place, drop
    privileges and run.
    """
    checker = settings["role"] == "checker"
    try:
        if settings["level"] == "bubblewrap":
            isolation.set_dumpable(True)
        isolation.die_with_parent(parent)
        os.setsid()
        task = os.pread(task_file, os.fstat(task_file).st_size, 0)
        if grouped:
            os.write(passed.pop(), b"0")
        failed = _arrange(passed, failed, settings)
        _limit(limits, settings)
        isolation.no_new_privileges()
        _confine(settings)
        os.environ.update(PATH="/usr/bin:/bin", HOME="/tmp", LANG="C.UTF-8")
        os.close(failed)
    except BaseException as error:
        os.write(failed, f"{type(error).__name__}: {error}".encode()[:1000] or b"unknown")
        os._exit(1)
    if checker:
        from megatron_dcpo.sandbox.guest.test_runner import run_checks

        run_checks(task, limits)
    run_program(
        json.loads(task), calls=3 if len(passed) > 3 else None, message_bytes=limits["output_bytes"]
    )


def _confine(settings: dict[str, Any]) -> None:
    """Give up capabilities, files, and system calls, for good."""
    if settings["level"] == "unsafe":
        return
    if not seccomp.supported():
        raise OSError(
            f"the system calls of {os.uname().machine} are not known: must be x86_64 or aarch64"
        )
    if settings["level"] == "bubblewrap":
        isolation.drop_capabilities()
    else:
        isolation.landlock(
            settings["shared"]["readable"], settings["shared"]["listable"], ["/dev/null"]
        )
    seccomp.confine(*settings["filter"])


def _filter(settings: dict[str, Any]) -> tuple[bool, bool]:
    """Return the arguments of ``seccomp.confine``: whether the process is alone, and whether it may
    truncate files.
    """
    bubblewrap = settings["level"] == "bubblewrap"
    truncates = bubblewrap or isolation.landlock_abi() >= isolation.ABI_OF_TRUNCATE
    return settings["role"] == "checker" or not bubblewrap, truncates


def _arrange(passed: list[int], failed: int, settings: dict[str, Any]) -> int:
    """Make stdin, stdout, stderr and the pipe of the tests 0 to 3, and close everything else, but
    the descriptor that is returned: ``failed`` under its new number.
    """
    high = [os.dup2(pipe, 500 + target) for target, pipe in enumerate([*passed, failed])]
    for target, pipe in enumerate(high[:-1]):
        os.dup2(pipe, target)
    start = len(passed)
    for pipe in sorted([high[-1], *settings["shared"]["descriptors"]]):
        os.closerange(start, pipe)
        start = pipe + 1
    os.closerange(start, 1024)
    return high[-1]


def _limit(limits: dict[str, Any], settings: dict[str, Any]) -> None:
    cpu = int(limits["cpu_seconds"])
    isolation.limit(resource.RLIMIT_CPU, cpu, cpu + 1)
    isolation.limit(
        resource.RLIMIT_AS,
        limits["checker_bytes" if settings["role"] == "checker" else "memory_bytes"],
    )
    isolation.limit(resource.RLIMIT_FSIZE, limits["output_bytes"])
    isolation.limit(
        resource.RLIMIT_CORE, 1
    )  # 0 would still start a program that core_pattern names
    isolation.limit(resource.RLIMIT_NOFILE, MAX_FILES + 16 * len(settings["shared"]["descriptors"]))
    isolation.limit(resource.RLIMIT_MEMLOCK, 0)
    isolation.limit(resource.RLIMIT_MSGQUEUE, 0)
    if settings["level"] != "unsafe":
        isolation.limit(
            resource.RLIMIT_NPROC, limits["processes"] + settings["shared"]["processes"]
        )


def _places(settings: dict[str, Any]) -> dict[str, Any]:
    """Open the directories that a program under Landlock may read while this process still can: it
    may have been started by root with a Python that no other user can reach. ``sys.path`` then
    refers to the open descriptors.
    """
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
        for package in list(
            sys.modules.values()
        ):  # such as encodings, which looks for codecs later
            if isinstance(folders := getattr(package, "__path__", None), list):
                folders[:] = [_through(opened, folder) for folder in folders]
    return {
        "descriptors": list(opened.values()),
        "readable": [opened[name] for name in settings["readable"] if name in opened],
        "listable": [opened[name] for name in settings["listable"] if name in opened],
        "processes": _own_processes(),
    }


def _through(opened: dict[str, int], folder: str) -> str:
    """Return ``place`` by way of the open directory that holds it."""
    for name, descriptor in opened.items():
        if folder.startswith(f"{name}/"):
            return f"/proc/self/fd/{descriptor}{folder.removeprefix(name)}"
    return folder


def _own_processes() -> int:
    """Return processes and threads of this user, which count against its limit of processes."""
    user, count = (
        (65534 if os.geteuid() == 0 else os.geteuid()),
        64,
    )  # other sandboxes come and go
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return count


def _become_ordinary(settings: dict[str, Any]) -> None:
    """Become an ordinary user. For root no limit of processes holds, and file permissions do not
    count.
    """
    if settings["level"] != "unsafe" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    os.chdir("/")
