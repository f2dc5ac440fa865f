"""Programs on a remote sandbox that speaks Sandbox Fusion's protocol: ``POST URL/run_code``.

The request holds ``code, language, stdin, run_timeout, compile_timeout, memory_limit_MB``; the answer ``status`` and
``run_result`` with ``status, return_code, stdout, stderr``. Expected values stay here: outputs are compared by the
judge, and tests that call the program run in a local sandboxed process, whose calls are sent in batches.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.http_json import HttpError, JsonClient
from megatron_dcpo.sandbox.guest import rpc
from megatron_dcpo.sandbox.local import (
    DEFINE_SOURCES,
    CodeLimits,
    Level,
    SandboxDied,
    Server,
    choose,
    remaining,
    running_tests,
)
from megatron_dcpo.sandbox.tests import EXITS, Category, CodeVerdict, same_output

ATTEMPTS = 3  # of a request
_HTTP_SECONDS = 30.0  # beyond the program's own time
_SCRIPT = f"""
import base64, json, os, sys, types
order = json.loads(base64.b64decode(ORDER))
{DEFINE_SOURCES}calls = json.loads(sys.stdin.read())
output = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
program = sys.modules["megatron_dcpo.sandbox.guest.program"]
try:
    program.answer_calls(order["job"], calls, output, order["message_bytes"])
except Exception as error:
    sys.stderr.write((type(error).__name__ + ": " + str(error))[:1000])
    os._exit(program.category_code(error))
"""


class RemoteSession:
    """Judges programs on the service at ``url``; the tests' process is local. Not thread-safe."""

    def __init__(self, url: str, limits: CodeLimits) -> None:
        self.url, self.limits = url.rstrip("/"), limits
        self.client = JsonClient(self.url, attempts=ATTEMPTS, max_reply_bytes=(limits.output_mb << 20) * 4 + (1 << 20))
        self.checker: Server | None = None
        self.checker_level = _checker_level()

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        if self.checker is not None:
            self.checker.close()

    def judge(self, program: str, tests: dict[str, Any]) -> CodeVerdict:
        """Return the verdict on ``program``. Raises UserError when the service does not answer: that is not a reward of
        0."""
        if tests["kind"] == "stdin":
            return self._by_output(program, tests)
        for attempt in range(ATTEMPTS):
            try:
                return self._by_calls(program, tests)
            except SandboxDied:
                if self.checker is not None:
                    self.checker.close()
                self.checker = None
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _by_output(self, program: str, tests: dict[str, Any]) -> CodeVerdict:
        deadline = time.monotonic() + self.limits.program_seconds
        code = "\n".join(filter(None, [tests["setup"], program]))
        for place, (given, expected) in enumerate(tests["cases"], start=1):
            left = min(self.limits.test_seconds, remaining(deadline))
            if not left:
                return CodeVerdict(0, "timeout", f"case {place}: out of time")
            category, detail, output = self._run(code, given, left)
            if category == "passed" and not same_output(output.encode(errors="replace"), expected, tests["atol"]):
                category, detail = "wrong", "another output than expected"
            if category != "passed":
                return CodeVerdict(0, category, f"case {place}: {detail}")
        return CodeVerdict(1, "passed")

    def _by_calls(self, program: str, tests: dict[str, Any]) -> CodeVerdict:
        if self.checker is None or not self.checker.alive():
            self.checker = Server(self.checker_level, "checker")
        total = self.limits.program_seconds
        with ExitStack() as stack:
            checker_end, program_end = socket.socketpair()
            stack.callback(program_end.close)
            # The service starts an interpreter per batch; the tests' patience covers that.
            patient = replace(self.limits, test_seconds=total, program_seconds=total + _HTTP_SECONDS)
            verdict = stack.enter_context(running_tests(self.checker, patient, tests, checker_end.fileno()))
            checker_end.close()
            remote_program = _RemoteProgram(self, program_end, {"program": program, "setup": tests["setup"]})
            thread = threading.Thread(target=remote_program.answer, daemon=True)
            thread.start()
            report = verdict()
            program_end.shutdown(socket.SHUT_RDWR)
            thread.join()
        if remote_program.error is not None:
            raise remote_program.error
        if report["category"] == "gone":
            category = "runtime_error" if remote_program.category == "passed" else remote_program.category
            return CodeVerdict(0, category, remote_program.detail or "the program ended before its tests were done")
        return CodeVerdict(int(report["category"] == "passed"), report["category"], report["detail"])

    def _run(self, code: str, stdin: str, seconds: float) -> tuple[Category, str, str]:
        """Category, detail and output of one run. Raises UserError when the service fails ``ATTEMPTS`` times."""
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": seconds,
            "compile_timeout": seconds,
            "memory_limit_MB": self.limits.memory_mb,
        }
        try:
            reply = self.client.call("/run_code", body, timeout=seconds + _HTTP_SECONDS, problem=_problem)
        except HttpError as error:
            raise UserError(f"the remote sandbox {self.url} does not run programs: {error}") from None
        result: Mapping[str, Any] = reply["run_result"]
        output = str(result.get("stdout") or "")
        complaint = (str(result.get("stderr") or "").strip().splitlines() or [""])[-1][:300]
        if result.get("status") == "TimeLimitExceeded":
            return "timeout", "out of time", output
        if len(output) > self.limits.output_mb << 20:
            return "output_limit", f"over {self.limits.output_mb} MB of output", ""
        code_ = result.get("return_code")
        if result.get("status") == "Finished" and code_ in (0, None):
            return "passed", "", output
        return _category(code_, complaint), complaint or f"exit status {code_}", output


def _problem(reply: Any) -> str:
    """Why the service has not run the program, "" when it has."""
    if not isinstance(reply, dict):
        return f"a reply that is not an object: {reply!r:.100}"
    if reply.get("status") != "SandboxError" and isinstance(reply.get("run_result"), dict):
        return ""
    return str(reply.get("message") or reply.get("status"))


class _RemoteProgram:
    """The program's end of the tests' pipe. Every batch of calls is a new run, which repeats the calls before it."""

    def __init__(self, session: RemoteSession, pipe: socket.socket, job: dict[str, Any]) -> None:
        self.session, self.pipe, self.job = session, pipe, job
        self.category: Category = "passed"
        self.detail = ""
        self.error: UserError | None = None

    def answer(self) -> None:
        reader = rpc.Reader(self.pipe.fileno(), 1 << 30)
        calls: list[Any] = []
        try:
            while True:
                new = reader.read()["calls"]
                calls += new
                answers = self._answers(calls)
                if answers is None:
                    return
                rpc.write_all(self.pipe.fileno(), b"".join(answers[len(calls) - len(new) :]))
        except UserError as error:
            self.error = error
        except (rpc.Gone, rpc.BadMessage, rpc.TooLong):
            return
        finally:
            with contextlib.suppress(OSError):
                self.pipe.shutdown(socket.SHUT_RDWR)

    def _answers(self, calls: list[Any]) -> list[bytes] | None:
        limits = self.session.limits
        seconds = min(limits.program_seconds, limits.test_seconds * max(1, len(calls)))
        self.category, self.detail, output = self.session._run(
            _script(self.job, limits.output_mb << 20), json.dumps(calls), seconds
        )
        if self.category != "passed":
            return None
        try:
            data = base64.b64decode(output.strip(), validate=True)
        except ValueError:
            return None
        answers = []
        while len(data) >= 4:
            size = 4 + struct.unpack("!I", data[:4])[0]
            answers.append(data[:size])
            data = data[size:]
        return answers if len(answers) == len(calls) and not data else None


def _script(job: dict[str, Any], message_bytes: int) -> str:
    here = Path(__file__).parent / "guest"
    sources = {name: (here / f"{name}.py").read_text(encoding="utf-8") for name in ("rpc", "program")}
    order = json.dumps({"job": job, "sources": sources, "message_bytes": message_bytes}).encode()
    return f"ORDER = {base64.b64encode(order)!r}\n{_SCRIPT}"


def _category(code: Any, complaint: str) -> Category:
    if isinstance(code, int) and code in EXITS:
        return EXITS[code]
    if complaint.startswith("MemoryError"):
        return "memory"
    if complaint.startswith("PermissionError"):
        return "forbidden"
    return "runtime_error"


def _checker_level() -> Level:
    """Run the tests as the task's own code, which a machine without any sandbox may do."""
    try:
        return choose("auto")
    except UserError:
        return "unsafe"
