"""A program against the tests of its task, in a sandbox: correct iff every test passes.

The program's process never holds an expected value: its output is compared here, and tests that
call it (``check(candidate)``, assert lists, argument lists) run in another sandboxed process, which
reaches the program through a pipe.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox import cgroup
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.local import (
    Ending,
    Level,
    Role,
    SandboxDied,
    Server,
    choose,
    end_of_run,
    in_memory,
    last_line,
    remaining,
    running_tests,
    start_run,
)
from megatron_dcpo.sandbox.tests import (
    CATEGORIES,
    EXITS,
    Category,
    CodeVerdict,
    checked_tests,
    same_output,
)

__all__ = ["CATEGORIES", "CodeLimits", "CodePool", "CodeVerdict", "judge_programs"]

ATTEMPTS = 3  # of a program whose sandbox died
_SIGXCPU = -24
_SIGKILL = -9


def judge_programs(
    items: Sequence[tuple[str | None, Mapping[str, Any]]],
    *,
    limits: CodeLimits | None = None,
    sandbox: str = "auto",
    workers: int = 2,
) -> list[CodeVerdict]:
    """Return the verdicts in the order of ``items``, which are pairs of a program and its tests
    (``tests.checked_tests``).

    Raises UserError for malformed tests, and if no sandbox works.
    """
    with CodePool(limits=limits or CodeLimits(), sandbox=sandbox, workers=workers) as pool:
        futures = [pool.submit(program, tests) for program, tests in items]
        return [future.result() for future in futures]


class CodePool:
    """Judges programs in ``workers`` sandboxes at a time. ``submit`` returns at once, so that
    judging overlaps whatever the caller does next. Servers start with the first program and stay
    warm until ``close``.
    """

    def __init__(
        self, *, limits: CodeLimits | None = None, sandbox: str = "auto", workers: int = 2
    ) -> None:
        if workers < 1:
            raise UserError(f"workers is {workers}: it must be at least 1")
        self.limits = limits or CodeLimits()
        self.level = choose(sandbox)
        if self.level != "unsafe":
            cgroup.place()  # raises here, and not in a worker, if the named group is not usable
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        self._owner = os.getpid()
        self._started = False
        self._lock = threading.Lock()

    def __enter__(self) -> CodePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self, program: str | None, tests: Mapping[str, Any], where: str = "tests"
    ) -> Future[CodeVerdict]:
        """Return the future verdict, which is ``no_program`` for None or a blank program. Raises
        UserError naming ``where`` for malformed tests.
        """
        if self._owner != os.getpid():
            raise RuntimeError("this pool belongs to the process that made it")
        checked = checked_tests(tests, where)
        future: Future[CodeVerdict] = Future()
        if program is None or not program.strip():
            future.set_result(
                CodeVerdict(
                    correct=0,
                    category="no_program",
                    detail="no complete fenced program before the confidence",
                )
            )
            return future
        with self._lock:
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
        self._jobs.put(_Job(program=program, tests=checked, future=future))
        return future

    def close(self) -> None:
        """End the sandboxes; waiting programs are cancelled."""
        if self._owner != os.getpid() or not self._started:
            return
        try:
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.future.cancel()
        except queue.Empty:
            pass
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._started = False

    def _work(self) -> None:
        with SandboxSession(self.level, self.limits) as session:
            while (job := self._jobs.get()) is not None:
                if not job.future.set_running_or_notify_cancel():
                    continue
                try:
                    job.future.set_result(session.judge(job.program, job.tests))
                except BaseException as error:
                    job.future.set_exception(error)


@dataclass(frozen=True)
class _Job:
    program: str
    tests: dict[str, Any]
    future: Future[CodeVerdict]


class SandboxSession:
    """A warm server for programs and, when a task needs it, one for tests. Not thread-safe."""

    def __init__(self, level: Level, limits: CodeLimits) -> None:
        self.level = level
        self.limits = limits
        self.servers: dict[Role, Server] = {}
        # Files in memory count for the group of the process that writes them.
        memory = limits.memory_mb + limits.scratch_mb + 2 * limits.output_mb
        where = None if level == "unsafe" else cgroup.place()
        self.groups = cgroup.ControlGroups(cgroup.limits_of(memory << 20, limits.processes), where)
        self.replaced = 0

    def __enter__(self) -> SandboxSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """End the servers; the next program gets new ones."""
        for server in self.servers.values():
            server.close()
        self.servers = {}

    def judge(self, program: str, tests: dict[str, Any]) -> CodeVerdict:
        """Return the verdict on ``program``. If the sandbox dies, the program is judged again in a
        new one, within its whole time.
        """
        judge = self._by_calls
        if tests["kind"] == "stdin":
            judge = self._by_output
        deadline = time.monotonic() + self.limits.program_seconds
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return judge(program, tests, deadline)
            except SandboxDied as error:
                self.replaced += 1
                self.discard()
                if attempt == ATTEMPTS or not remaining(deadline):
                    return CodeVerdict(
                        correct=0,
                        category="runtime_error",
                        detail=f"the sandbox died, attempt {attempt}: {error}",
                    )
        raise AssertionError("unreachable")

    def server(self, role: Role) -> Server:
        if role not in self.servers or not self.servers[role].alive():
            self.servers[role] = Server(self.level, role)
        return self.servers[role]

    def _by_output(self, program: str, tests: dict[str, Any], deadline: float) -> CodeVerdict:
        with (
            in_memory(_job(program, tests)) as task,
            self.server("program").spawn(self.limits, task) as channel,
        ):
            for number, (inputs, expected) in enumerate(tests["cases"], start=1):
                wall = min(self.limits.test_seconds, remaining(deadline))
                with (
                    in_memory(inputs.encode(errors="surrogatepass")) as stdin,
                    in_memory() as out,
                    in_memory() as err,
                ):
                    with self.groups.group() as group:
                        start_run(channel, wall, stdin, out, err, group=group.entry)
                        category, detail = self._category(
                            ending=end_of_run(channel, wall),
                            out=out,
                            err=err,
                            exceeded=group.exceeded(),
                        )
                    if category == "passed":
                        output = os.pread(out, self.limits.output_mb << 20, 0)
                        if not same_output(output, expected, tests["atol"]):
                            category = "wrong"
                            detail = "another output than expected"
                if category != "passed":
                    return CodeVerdict(
                        correct=0, category=category, detail=f"case {number}: {detail}"
                    )
        return CodeVerdict(1, "passed")

    def _by_calls(self, program: str, tests: dict[str, Any], deadline: float) -> CodeVerdict:
        limits = replace(self.limits, program_seconds=max(0.001, remaining(deadline)))
        with ExitStack() as stack:
            checker_end, program_end = socket.socketpair()
            stack.callback(program_end.close)
            stack.callback(checker_end.close)
            task = stack.enter_context(in_memory(_job(program, tests)))
            empty, out, err = (stack.enter_context(in_memory()) for _ in range(3))
            group = stack.enter_context(self.groups.group())
            channel = stack.enter_context(self.server("program").spawn(limits, task))
            start_run(
                channel,
                limits.program_seconds,
                empty,
                out,
                err,
                program_end.fileno(),
                group=group.entry,
            )
            checker = self.server("checker")
            verdict = stack.enter_context(
                running_tests(server=checker, limits=limits, tests=tests, pipe=checker_end.fileno())
            )
            program_end.close()
            checker_end.close()
            report = verdict()
            if report["category"] != "gone":
                return CodeVerdict(
                    correct=int(report["category"] == "passed"),
                    category=report["category"],
                    detail=report["detail"],
                )
            try:
                ending = end_of_run(channel, 2.0, grace=0.0)
            except TimeoutError:
                return CodeVerdict(
                    correct=0,
                    category="runtime_error",
                    detail="the program closed the pipe of its tests",
                )
            category, detail = self._category(
                ending=ending, out=out, err=err, exceeded=group.exceeded()
            )
            if category == "passed":
                category = "runtime_error"
                detail = "the program ended before its tests were done"
            return CodeVerdict(correct=0, category=category, detail=detail)

    def _category(self, ending: Ending, out: int, err: int, exceeded: bool) -> tuple[Category, str]:
        """Return the category of an ended process, ``passed`` if it ended by itself with status 0
        and within its limits. ``exceeded`` tells that its control group ran out of memory.
        """
        complaint = last_line(err)
        if ending.reason == "wall":
            return "timeout", "out of time"
        if ending.reason == "memory" or exceeded:
            return "memory", f"all processes together over {self.limits.memory_mb} MB"
        if os.fstat(out).st_size >= self.limits.output_mb << 20:
            return "output_limit", f"over {self.limits.output_mb} MB of output"
        if ending.code in EXITS:
            return EXITS[ending.code], complaint
        killed_late = ending.code == _SIGKILL and ending.cpu >= self.limits.program_seconds
        if ending.code == _SIGXCPU or killed_late:
            return "timeout", "out of processor time"
        if ending.code:
            return "runtime_error", complaint or f"exit status {ending.code}"
        return "passed", ""


def _job(program: str, tests: Mapping[str, Any]) -> bytes:
    job = {name: tests[name] for name in ("rule", "imports", "setup")}
    return json.dumps({"program": program, **job}).encode()
