# ruff: noqa: E501
"""What a program can make its judge spend: time beyond its limits, memory, restarts of the
sandbox.
"""

from __future__ import annotations

import json
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.sandbox.guest.rpc import BadMessage, Decoder
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.local import problem_of
from megatron_dcpo.sandbox.program_judge import SandboxSession
from megatron_dcpo.sandbox.tests import checked_tests

LIMITS = CodeLimits(test_seconds=2.0, program_seconds=20.0)
ONE = {"kind": "function", "entry_point": "f", "cases": [{"args": [1], "expected": 2}]}
LONG = {
    "kind": "function",
    "entry_point": "f",
    "cases": [{"args": ["x" * 3_000_000], "expected": 2}],
}
FORMATS = {
    "kind": "check",
    "entry_point": "f",
    "code": "def check(candidate):\n    assert candidate(1) == 2, f'{candidate(1)}'",
}
DECIMALS = {
    "kind": "check",
    "entry_point": "f",
    "code": "def check(candidate):\n    assert int(candidate(1)) == 2",
}


def answers(value: Any) -> str:
    """A program that sends this encoded value before any call."""
    body = json.dumps({"ok": value, "objects": []}).encode()
    return f"import os\nos.write(3, {struct.pack('!I', len(body)) + body!r})\ndef f(x): return 2"


# name: (program, tests, categories it may end with)
COSTLY: dict[str, tuple[str, dict[str, Any], str]] = {
    "feigned death": (
        "import os\nos.write(2, b'sandbox: x\\n')\nos._exit(125)",
        ONE,
        "runtime_error",
    ),
    "feigned failure to start": (
        "import os\nfor f in range(3, 1024):\n    try: os.write(f, "
        "b'OSError: x')\n    except OSError: pass\n"
        "os._exit(1)",
        ONE,
        "wrong runtime_error output_limit",
    ),
    "closed pipe and sleep": (
        "import os, time\nos.close(3)\ntime.sleep(100)",
        ONE,
        "runtime_error",
    ),
    "too many digits to print": ("def f(x): return 10 ** 6000", FORMATS, "wrong"),
    "fraction of text": (answers(["F", "1e3000000000", None]), ONE, "wrong"),
    "range of text": (answers(["r", "0", "1", "2"]), ONE, "wrong"),
    "huge integer of a decimal": (
        "import decimal\ndef f(x): return decimal.Decimal('1e800000000')",
        DECIMALS,
        "timeout memory wrong",
    ),
    "colliding set": (
        "def f(x): return {i * (2 ** 61 - 1) for i in range(1, 150000)}",
        ONE,
        "timeout",
    ),
    "never reads": ("import time\ntime.sleep(100)", LONG, "timeout"),
    "reads slowly": (
        "import os, time\nwhile True:\n    os.read(3, 1); time.sleep(1)",
        LONG,
        "timeout",
    ),
    "item size of the sender": (answers(["a", "S1800000000", [0]]), ONE, "wrong"),
    "wide text": (answers(["a", "<U90000000", ["a" * 4_000_000, *["b"] * 1000]]), ONE, "wrong"),
}


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def session(request: pytest.FixtureRequest) -> Iterator[SandboxSession]:
    if problem := problem_of(request.param):
        pytest.skip(f"{request.param} does not work on this machine: {problem}")
    with SandboxSession(request.param, LIMITS) as session:
        session.judge("def f(x): return 2", checked_tests(ONE))
        yield session


@pytest.mark.parametrize("name", COSTLY)
def test_no_program_costs_more_than_its_limits(session: SandboxSession, name: str) -> None:
    """None restarts a sandbox, which would run it again, and none uses the whole time where one
    call's is at stake.
    """
    program, tests, categories = COSTLY[name]
    replaced, start = session.replaced, time.monotonic()
    verdict = session.judge(program, checked_tests(tests))
    assert verdict.category in categories.split(), verdict
    assert session.replaced == replaced, verdict
    if name not in ("reads slowly",):  # which makes progress, second by second
        assert time.monotonic() - start < LIMITS.program_seconds
    assert session.judge("def f(x): return x + 1", checked_tests(ONE)).correct == 1


@pytest.mark.parametrize(
    "value",
    [
        ["a", "S1800000000", [0]],
        ["a", "O8", [0]],
        ["a", "<U90000000", ["x" * 5_000_000, *["y"] * 100]],
        ["a", "<V8", [0]],
        ["a", "<f800", [0]],
        ["F", "1e3000000000", None],
        ["F", 1, 0],
        ["F", 1.5, 2],
        ["r", "1", 2, 3],
        ["r", 1, 2, 0],
        ["D", [1]],
    ],
)
def test_values_that_no_honest_program_sends(value: Any) -> None:
    with pytest.raises(BadMessage):
        Decoder([], {}, lambda *_: None).decode(value)


def test_arrays_are_no_attributes_of_the_tasks_own_objects() -> None:
    """``node.val != expected`` is false for an empty array in older NumPy: a tree without values
    would be the right one.
    """

    class ListNode:
        pass

    with pytest.raises(BadMessage, match="array"):
        Decoder([["ListNode", {"val": ["a", "<f8", []]}]], {"ListNode": ListNode}, lambda *_: None)


_JUDGE = """
import resource, sys
from megatron_dcpo.sandbox.program_judge import CodeLimits, CodePool
limits = CodeLimits(test_seconds=20, program_seconds=60)
with CodePool(limits=limits, workers=1) as pool:
    pool.submit("print(1)", {"kind": "stdin", "cases": [{"input": "", "output": "1"}]}).result()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for program, expected in eval(sys.stdin.read()):
        pool.submit(program, {"kind": "stdin", "cases": [{"input": "", "output": expected}]}).result()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) / 1024 / limits.output_mb)
"""


@pytest.mark.skipif(
    bool(problem_of("bubblewrap") and problem_of("landlock")),
    reason="no sandbox works on this machine",
)
def test_memory_of_the_judge_is_bounded() -> None:
    """At most 4 x ``output_mb`` per worker (docs/programs.md), whatever 16 MB of output
    consist of.
    """
    size = 16_000_000
    outputs = [
        (f"print('1 ' * {size // 2})", "1"),
        (f"print('\\n' * {size - 10})", "1"),
        (f"print('1\\n' * {size // 2})", "1\n" * 1000),
        (f"print('1 ' * {size // 2})", "1 " * 1000 + "2"),
        (f"import sys\nsys.stdout.buffer.write(b'\\xff' * {size})", "1"),
        (f"print('9' * {size})", "9" * 1000),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", _JUDGE],
        input=repr(outputs),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert float(ran.stdout) < 4


def test_a_program_may_not_dump_its_core_and_dies_first(session: SandboxSession) -> None:
    code = "def check(candidate):\n    assert candidate() == (1, 1)"
    program = "import resource\ndef f(): return resource.getrlimit(resource.RLIMIT_CORE)"
    tests = checked_tests({"kind": "check", "entry_point": "f", "code": code})
    assert (
        session.judge(program, tests).correct == 1
    )  # 1 byte: 0 would start the program that core_pattern names
    for server in session.servers.values():
        assert int(Path(f"/proc/{server.process.pid}/oom_score_adj").read_text()) == 1000
    assert resource.getrlimit(resource.RLIMIT_CORE)  # this process keeps its own
