"""The remote sandbox, against a small server that speaks Sandbox Fusion's documented protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox.judge import CodeLimits, judge_programs


class Fusion(BaseHTTPRequestHandler):
    requests: ClassVar[list[dict[str, Any]]] = []
    failures = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/run_code"
        assert body["language"] == "python"
        Fusion.requests.append(body)
        if Fusion.failures > 0:
            Fusion.failures -= 1
            answer = {"status": "SandboxError", "message": "no worker", "run_result": None}
        else:
            answer = self.run(body)
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        command = [sys.executable, "-c", "import sys; exec(compile(sys.argv[1], 'm', 'exec'))", body["code"]]
        try:
            done = subprocess.run(
                command, input=body["stdin"], capture_output=True, text=True, timeout=body["run_timeout"]
            )
        except subprocess.TimeoutExpired:
            return {
                "status": "Failed",
                "run_result": {"status": "TimeLimitExceeded", "return_code": None, "stdout": "", "stderr": ""},
            }
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
        return {"status": "Failed" if done.returncode else "Success", "run_result": result}

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Fusion.requests, Fusion.failures = [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fusion)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ADD = {
    "kind": "check",
    "entry_point": "add",
    "code": "def check(f):\n    assert f(1, 2) == 3\n    assert f(4120, 1) == 4121",
}
SUM = {"kind": "stdin", "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5\n", "output": "9\n"}]}
FUNCTION = {"kind": "function", "entry_point": "Solution.add", "cases": [{"args": [1, 2], "expected": 3}] * 5}
CASES = [
    ("print(sum(map(int, input().split())))", SUM, "passed"),
    ("print(3)", SUM, "wrong"),
    ("1/0", SUM, "runtime_error"),
    ("while True: pass", SUM, "timeout"),
    ("raise MemoryError", SUM, "memory"),
    ("def add(a, b):\n    print('noise')\n    return a + b", ADD, "passed"),
    ("def add(a, b): return a - b", ADD, "wrong"),
    ("def add(a, b): return 1 // 0", ADD, "runtime_error"),
    ("exit(0)", ADD, "runtime_error"),
    ("import os\nos._exit(0)", ADD, "runtime_error"),
    ("class Solution:\n    def add(self, a, b): return a + b", FUNCTION, "passed"),
]


def test_verdicts(url: str) -> None:
    items = [(program, tests) for program, tests, _ in CASES]
    verdicts = judge_programs(items, limits=CodeLimits(test_seconds=4, program_seconds=30), sandbox=url)
    assert [verdict.category for verdict in verdicts] == [category for _, _, category in CASES], verdicts
    sent = json.dumps(Fusion.requests)
    assert "4121" not in sent, "an expected value was sent to the service"


def test_a_failing_service_is_tried_again(url: str) -> None:
    Fusion.failures = 2
    assert judge_programs([("print(sum(map(int, input().split())))", SUM)], sandbox=url)[0].correct == 1


def test_no_service_is_an_error_and_no_reward_of_zero() -> None:
    with pytest.raises(UserError, match=r"remote sandbox http://127\.0\.0\.1:9 "):
        judge_programs([("print(3)", SUM)], sandbox="http://127.0.0.1:9")
