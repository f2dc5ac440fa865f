"""A program and the supervisor that watches it: what reaches the supervisor, and what escapes its
sum of the program's memory.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.local import problem_of
from megatron_dcpo.sandbox.program_judge import CodeVerdict, SandboxSession
from megatron_dcpo.sandbox.tests import checked_tests

LIMITS = CodeLimits(test_seconds=10.0, program_seconds=30.0, memory_mb=256)
HONEST = "print(sum(map(int, input().split())))"
EPERM = 1
EINVAL = 22
REFUSED = (EPERM, 38)  # ENOSYS, for calls whose numbers are new

_PREAMBLE = """
import ctypes, os, resource, signal, socket, threading, time
libc = ctypes.CDLL(None, use_errno=True)
supervisor = os.getppid()
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")
"""
# Each is refused. Without the filter, a process may do all but the last three to another one of its
# user.
_AIMED_AT_THE_SUPERVISOR = {
    "limits": "resource.prlimit(supervisor, resource.RLIMIT_NOFILE, (3, 3))",
    "processor time": "resource.prlimit(supervisor, resource.RLIMIT_CPU, (1, 1))",
    "number of limits": "resource.prlimit(supervisor, resource.RLIMIT_NOFILE)",
    "cores": "os.sched_setaffinity(supervisor, {max(os.sched_getaffinity(0))})",
    "scheduler": "os.sched_setscheduler(supervisor, os.SCHED_IDLE, os.sched_param(0))",
    "priority": "os.setpriority(os.PRIO_PROCESS, supervisor, 19)",
    "priority of its user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "disk priority": "call(IOPRIO_SET, 1, supervisor, 3 << 13)",
    "memory": "call(PROCESS_VM_WRITEV, supervisor, None, 0, None, 0, 0)",
    "descriptors": "call(PIDFD_GETFD, os.pidfd_open(supervisor), 0, 0)",
    "tracing": "call(PTRACE, 16, supervisor, 0, 0)",
}
_NUMBERS = {
    "IOPRIO_SET": {"x86_64": 251, "aarch64": 30},
    "PROCESS_VM_WRITEV": {"x86_64": 311, "aarch64": 271},
    "PIDFD_GETFD": {"x86_64": 438, "aarch64": 438},
    "PTRACE": {"x86_64": 101, "aarch64": 117},
    "CLONE": {"x86_64": 56, "aarch64": 220},
    "CLOSE_RANGE": {"x86_64": 436, "aarch64": 436},
    "EXIT": {"x86_64": 60, "aarch64": 93},  # of a thread
}
_EVERY_SIGNAL = """
routes = [
    lambda number: os.kill(supervisor, number),
    lambda number: libc.tgkill(supervisor, supervisor, number),
    lambda number: libc.sigqueue(supervisor, number, None),
    lambda number: signal.pidfd_send_signal(os.pidfd_open(supervisor), number),
]
for route in routes:
    for number in range(1, 65):
        try: route(number)
        except OSError: pass
print("alive")
"""
_FILL_SOCKETS = """
def fill():
    ends = []
    try:
        while True:
            sender, receiver = socket.socketpair()
            ends.append(receiver)
            sender.setblocking(False)
            try:
                while True: sender.send(bytes(1 << 16))
            except BlockingIOError: pass
            sender.close()
    except OSError: pass
    return ends
"""
_START_PROCESSES = """
def start(work, processes):
    for _ in range(processes):
        started, say = os.pipe()
        if os.fork() == 0:
            kept = work(say)
            os.write(say, b"x")
            time.sleep(60)
        os.read(started, 1)
        os.close(started); os.close(say)
    time.sleep(1)  # the supervisor looks every 50 ms
    print("alive")
"""


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def session(request: pytest.FixtureRequest) -> Iterator[SandboxSession]:
    if problem := problem_of(request.param):
        pytest.skip(f"{request.param} does not work on this machine: {problem}")
    with SandboxSession(request.param, LIMITS) as session:
        yield session


def verdict_of(session: SandboxSession, program: str, output: str) -> CodeVerdict:
    """Return the verdict on a program that prints ``output`` in two cases, of which its supervisor
    has to start the second after the program's first run. No sandbox dies of it, and the next
    program gets its right verdict.
    """
    constants = []
    for name, numbers in _NUMBERS.items():
        constants.append(f"{name} = {numbers[platform.machine()]}")
    code = "\n".join([_PREAMBLE, *constants, program])
    case = {"input": "", "output": output}
    replaced = session.replaced
    verdict = session.judge(code, _stdin(case, case))
    assert session.judge(HONEST, _stdin({"input": "2 3", "output": "5"})).correct == 1
    assert session.replaced == replaced, verdict
    return verdict


def _stdin(*cases: dict[str, str]) -> dict[str, Any]:
    return checked_tests({"kind": "stdin", "cases": list(cases)})


def _only_with_processes(session: SandboxSession) -> None:
    if session.level != "bubblewrap":
        pytest.skip("a program of this level starts no process")


@pytest.mark.parametrize("attempt", _AIMED_AT_THE_SUPERVISOR)
def test_no_program_reaches_its_supervisor(session: SandboxSession, attempt: str) -> None:
    call = _AIMED_AT_THE_SUPERVISOR[attempt]
    program = (
        f"try:\n    {call}\nexcept OSError as error: print(error.errno in {REFUSED})\n"
        "else: print('done')"
    )
    verdict = verdict_of(session, program=program, output="True")
    assert verdict.category == "passed", verdict


def test_who_reaches_for_its_supervisor_is_forbidden(session: SandboxSession) -> None:
    program = f"{_AIMED_AT_THE_SUPERVISOR['limits']}\nprint('alive')"
    verdict = verdict_of(session, program=program, output="alive")
    assert (verdict.correct, verdict.category) == (0, "forbidden")


def test_a_supervisor_outlives_every_signal(session: SandboxSession) -> None:
    verdict = verdict_of(session, program=_EVERY_SIGNAL, output="alive")
    assert verdict.category == "passed", verdict


def test_a_program_sets_its_own_limits_and_starts_threads(session: SandboxSession) -> None:
    """What the refusals above must leave alone: limits of the process itself, threads, event loops
    (a socket pair), and closing a range of descriptors.
    """
    program = (
        "import asyncio\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (30, 30))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "thread = threading.Thread(target=lambda: print('thread'))\n"
        "thread.start(); thread.join()\n"
        "asyncio.run(asyncio.sleep(0))\n"
        "call(CLOSE_RANGE, 20, 21, 0); call(CLOSE_RANGE, 20, 21, 4)\n"
    )
    verdict = verdict_of(session, program=program, output="(30, 30)\nthread")
    assert verdict.category == "passed", verdict


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("CLOSE_RANGE, 20, 21, 2", EPERM),  # CLOSE_RANGE_UNSHARE
        ("CLOSE_RANGE, 20, 21, 6", EPERM),
        ("CLONE, 0x10000, 0, 0, 0, 0", EPERM),  # CLONE_THREAD
        # with CLONE_FILES; the kernel misses CLONE_SIGHAND
        ("CLONE, 0x10400, 0, 0, 0, 0", EINVAL),
    ],
)
def test_no_thread_has_descriptors_of_its_own(
    session: SandboxSession, call: str, error: int
) -> None:
    """Or each of them could fill as many sockets as a process, and show none where the supervisor
    looks.
    """
    program = f"try: call({call})\nexcept OSError as error: print(error.errno)"
    verdict = verdict_of(session, program=program, output=str(error))
    assert verdict.category == "passed", verdict


def test_sockets_count_as_memory(session: SandboxSession) -> None:
    """What socket pairs hold is in the kernel, and in no process's memory."""
    _only_with_processes(session)
    work = "start(lambda say: fill(), processes=20)"
    program = _FILL_SOCKETS + _START_PROCESSES + work
    verdict = verdict_of(session, program=program, output="alive")
    assert (verdict.correct, verdict.category) == (0, "memory")


def test_sockets_that_processes_share_count_once(session: SandboxSession) -> None:
    """In 20 processes, 50 sockets are as many as in one."""
    _only_with_processes(session)
    pairs = "pairs = [socket.socketpair() for _ in range(25)]\n"
    work = "start(lambda say: None, processes=20)"
    verdict = verdict_of(session, program=pairs + _START_PROCESSES + work, output="alive")
    assert verdict.category == "passed", verdict


def test_the_memory_of_a_process_whose_first_thread_has_ended_counts(
    session: SandboxSession,
) -> None:
    """The kernel's record of such a process shows none."""
    _only_with_processes(session)
    program = f"""
def work(say):
    def hold():
        time.sleep(0.2)
        held = bytearray(150 << 20)
        for place in range(0, len(held), 4096): held[place] = 1
        os.write(say, b"x")
        time.sleep(60)
    threading.Thread(target=hold).start()
    libc.syscall(EXIT, 0)
{_START_PROCESSES}
start(work, processes=3)
"""
    verdict = verdict_of(session, program=program, output="alive")
    assert (verdict.correct, verdict.category) == (0, "memory")
