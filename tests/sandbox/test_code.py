"""Programs against their tests: kinds, categories, limits, replacement of dead sandboxes, the
command line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import extract_program
from megatron_dcpo.sandbox import bubblewrap, local
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.program_judge import CodePool, SandboxSession
from megatron_dcpo.sandbox.tests import check_syntax, checked_tests, same_output
from tests.helpers.processes import below, left_after

LIMITS = CodeLimits(test_seconds=10.0, program_seconds=60.0)
SUM = {
    "kind": "stdin",
    "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": "9"}],
}
LIST_SETUP = (
    "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val, self.next = "
    "val, next\n"
    "def build(xs):\n    head = None\n    for x in reversed(xs): head = ListNode(x, head)\n    "
    "return head\n"
    "def same(a, b):\n    while a and b and a.val == b.val: a, b = a.next, b.next\n    return a "
    "is None and b is None\n"
)


def check(code: str, entry: str = "f", **more: Any) -> dict[str, Any]:
    body = "\n".join(f"    {line}" for line in code.split("\n"))
    return {"kind": "check", "entry_point": entry, "code": f"def check(candidate):\n{body}", **more}


def asserts(*lines: str, **more: Any) -> dict[str, Any]:
    return {"kind": "asserts", "asserts": list(lines), **more}


def livecodebench(output: str, given: str = "") -> dict[str, Any]:
    cases = [{"input": given, "output": output}]
    return {"kind": "stdin", "rule": "livecodebench", "cases": cases}


def function(*cases: tuple[list[Any], Any], entry: str = "f", **more: Any) -> dict[str, Any]:
    rows = [{"args": args, "expected": expected} for args, expected in cases]
    return {"kind": "function", "entry_point": entry, "cases": rows, **more}


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "stdin": ("print(sum(map(int, input().split())))", SUM, "passed"),
    "main guard": (
        "def main(): print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        SUM,
        "passed",
    ),
    "reads all": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", SUM, "passed"),
    "reads bytes": (
        "import sys\nprint(sum(map(int, sys.stdin.buffer.readline().split())))",
        SUM,
        "passed",
    ),
    "by name": ("print(sum(map(int, open(0).read().split())))", SUM, "passed"),
    "raised recursion limit": (
        "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and "
        "1 + f(n - 1)\nf(20000)\n"
        "print(sum(map(int, input().split())))",
        SUM,
        "passed",
    ),
    "big thread stack": (
        "import sys, threading\nthreading.stack_size(1 << "
        "26)\nsys.setrecursionlimit(10**6)\n"
        "def f(n): return n and 1 + f(n - 1)\ndef main():\n    f(50000)\n    "
        "print(sum(map(int, input().split())))\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()",
        SUM,
        "passed",
    ),
    "thread prints after main": (
        "import threading\nthreading.Timer(.05, lambda: "
        "print(s)).start()\ns = sum(map(int, input().split()))",
        SUM,
        "passed",
    ),
    "prints at exit": (
        "import atexit\natexit.register(lambda: print(s))\ns = sum(map(int, input().split()))",
        SUM,
        "passed",
    ),
    "exit": ("print(sum(map(int, input().split())))\nexit()", SUM, "passed"),
    "exit status": ("print(sum(map(int, input().split())))\nexit(3)", SUM, "runtime_error"),
    "leaves": (
        "import os, sys\nprint(sum(map(int, input().split())))\nsys.stdout.flush()\nos._exit(0)",
        SUM,
        "passed",
    ),
    "scratch file": (
        "open('/tmp/x', 'w').write(input())\nprint(sum(map(int, open('/tmp/x').read().split())))",
        SUM,
        "passed bubblewrap",
    ),
    "child": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', "
        "'print(sum(map(int, input().split())))'],"
        "capture_output=True, text=True).stdout)",
        SUM,
        "passed bubblewrap",
    ),
    "numpy": (
        "import numpy as np\nprint(np.array(list(map(int, input().split()))).sum())",
        SUM,
        "passed",
    ),
    "codecs": (
        "import codecs\nfor c in ('utf-16', 'cp1252', 'shift_jis', 'idna', 'rot13'): "
        "codecs.lookup(c)\n"
        "print(sum(map(int, input().split())))",
        SUM,
        "passed",
    ),
    "event loop": (
        "import asyncio\nasync def main(): return sum(map(int, "
        "input().split()))\nprint(asyncio.run(main()))",
        SUM,
        "passed",
    ),
    "thread pool": (
        "from concurrent.futures import ThreadPoolExecutor as T\nwith T(2) as t: "
        "print(sum(t.map(int, input().split())))",
        SUM,
        "passed",
    ),
    "copies a file": (
        "import shutil, tempfile, os\nwith tempfile.TemporaryDirectory() as d:\n    "
        "open(d + '/a', 'w').write(input())\n"
        "    shutil.copy2(d + '/a', d + '/b'); print(sum(map(int, open(d + "
        "'/b').read().split())))",
        SUM,
        "passed bubblewrap",
    ),
    "other packages": (
        "import os\nd = os.path.dirname(os.__file__) + '/site-packages'\n"
        "print(sum(map(int, input().split())) + len(os.listdir(d) if "
        "os.path.isdir(d) else []))",
        SUM,
        "passed bubblewrap",
    ),
    "tests apart": (
        "import os\nprint(sum(map(int, input().split())), end='\\n\\n  \\n')",
        SUM,
        "passed",
    ),
    "first only": ("print(3)", SUM, "wrong"),
    "raises": ("print(3)\n1/0", SUM, "runtime_error"),
    "syntax": ("print(", SUM, "runtime_error"),
    "null": ("print(1)\x00", SUM, "runtime_error"),
    "long program": ("x = 1\n" * 100_000 + "print(sum(map(int, input().split())))", SUM, "passed"),
    "check": ("def f(a, b): return a + b", check("assert candidate(1, b=2) == 3"), "passed"),
    "check with a wrong answer": (
        "def f(a, b): return a",
        check("assert candidate(1, b=2) == 3"),
        "wrong",
    ),
    "check raises": (
        "def f(a, b): return a.x",
        check("assert candidate(1, b=2) == 3"),
        "runtime_error",
    ),
    "no such function": (
        "def g(a, b): return a",
        check("assert candidate(1, b=2) == 3"),
        "runtime_error",
    ),
    "expected exception": (
        "def f(a): raise ValueError('no')",
        check(
            "try:\n    candidate(1)\n    assert False\nexcept ValueError as "
            "e:\n    assert str(e) == 'no'"
        ),
        "passed",
    ),
    "out of memory": (
        "def f(a): return bytearray(8 << 30)",
        check("assert candidate(1)"),
        "memory",
    ),
    "never called": ("def f(a): return 1", check("assert True"), "wrong"),
    "types stay": (
        "def f(): return (1, [2.0, True], {3: {4}}, None, 'x', b'y', 2 ** 100)",
        check(
            "out = candidate()\nassert out == (1, [2.0, True], {3: {4}}, None, 'x', "
            "b'y', 2 ** 100)\n"
            "assert type(out) is tuple and out[1][1] is True and type(out[3]) is "
            "type(None)"
        ),
        "passed",
    ),
    "generator": (
        "def f(n):\n    yield from range(n)",
        check("assert list(candidate(3)) == [0, 1, 2]\nassert next(candidate(3)) == 0"),
        "passed",
    ),
    "function returned": (
        "def f(n): return lambda m: n + m",
        check("assert candidate(3)(4) == 7"),
        "passed",
    ),
    "arguments by value": (
        "def f(x):\n    x.sort()\n    return x",
        check("x = [2, 1]\nassert candidate(x) == [1, 2]\nassert x == [2, 1]"),
        "passed",
    ),
    "method": (
        "class Solution:\n    def f(self, a): return a + 1",
        check("assert candidate(a=1) == 2", "Solution().f"),
        "passed",
    ),
    "own classes": (
        "def f(head):\n    out = None\n    while head: out, head = ListNode(head.val, "
        "out), head.next\n    return out",
        check(
            "assert same(candidate(build(list(range(2000)))), build(list(range(2000))[::-1]))",
            setup=LIST_SETUP,
        ),
        "passed",
    ),
    "own classes with lies": (
        "class ListNode:\n    def __init__(self, *a): self.val = self.next "
        "= None\n    def __eq__(self, o): return True\n"
        "def f(head): return "
        "ListNode()",
        check("assert same(candidate(build([1, 2])), build([2, 1]))", setup=LIST_SETUP),
        "wrong",
    ),
    "asserts": (
        "def f(x): return x + 1",
        asserts("assert f(1) == 2", "assert f(2) == 3"),
        "passed",
    ),
    "one assert fails": (
        "def f(x): return 2",
        asserts("assert f(1) == 2", "assert f(2) == 3"),
        "wrong",
    ),
    "class of the program": (
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, "
        "b\ndef f(p): return [x.b for x in p]",
        asserts("assert f([Pair(1, 2), Pair(3, 4)]) == [2, 4]", "assert Pair(5, 6).a == 5"),
        "passed",
    ),
    "builtin's name": ("def sum(a, b): return a * b", asserts("assert sum(2, 3) == 6"), "passed"),
    "modules unimported": (
        "def f(x): return x ** .5",
        asserts("assert math.isclose(f(2), math.sqrt(2))"),
        "passed",
    ),
    "evalplus form": (
        "def f(x): return x / 3",
        {
            "kind": "asserts",
            "code": "import numpy as "
            "np\ninputs = [[1], "
            "[2.0], [True]]\n"
            "results = [0.3333333, 0.6666666, 0.3333333]\nfor i, (inp, exp) in "
            "enumerate(zip(inputs, results)):\n"
            "    assert np.allclose(f(*inp), exp, "
            "atol=1e-6)",
            "entry_point": "f",
        },
        "passed",
    ),
    "function": (
        "def f(a, b): return [a, (b,)]",
        function(([1, 2], [1, [2]]), (["x", None], ["x", [None]])),
        "passed",
    ),
    "function with keywords": (
        "def f(a, b): return a - b",
        {
            "kind": "function",
            "entry_point": "f",
            "cases": [{"args": [], "kwargs": {"b": 1, "a": 3}, "expected": 2}],
        },
        "passed",
    ),
    "function of a class": (
        "class Solution:\n    def f(self, a): return a",
        function(([1], 1), entry="Solution.f"),
        "passed",
    ),
    "within the default tolerance": (
        "def f(): return 0.1 + 0.2 + 1e-7",
        function(([], 0.3)),
        "passed",
    ),
    "outside the default tolerance": ("def f(): return 0.3 + 1e-5", function(([], 0.3)), "wrong"),
    "within a given tolerance": (
        "def f(): return [1, 2.05]",
        function(([], [1, 2]), atol=0.1),
        "passed",
    ),
    "integers are exact": ("def f(): return 10 ** 18 + 1", function(([], 10**18)), "wrong"),
    "second case raises": (
        "def f(x): return 1 // x",
        function(([1], 1), ([0], 0)),
        "runtime_error",
    ),
    # the names of standard files
    "/dev/stdin": (
        "import sys\nsys.stdin = open('/dev/stdin')\nprint(sum(map(int, input().split())))",
        SUM,
        "passed",
    ),
    "/proc/self/fd/0": (
        "print(sum(map(int, open('/proc/self/fd/0').read().split())))",
        SUM,
        "passed",
    ),
    "/dev/fd/0 as a descriptor": (
        "import os\nprint(sum(map(int, os.read(os.open('/dev/fd/0', os.O_RDONLY), 99).split())))",
        SUM,
        "passed",
    ),
    "/dev/stdin by pathlib": (
        "import pathlib\np = pathlib.Path('/dev/stdin')\nassert p.exists()\n"
        "print(sum(map(int, p.read_text().split())))",
        SUM,
        "passed",
    ),
    "/dev/stdin by numpy": (
        "import numpy\nprint(int(numpy.loadtxt('/dev/stdin').sum()))",
        SUM,
        "passed",
    ),
    "/dev/stdin in bytes": (
        "import os\nassert os.path.isfile('/dev/stdin') and not os.path.exists('/dev/fd/9')\n"
        "print(sum(map(int, open(b'/dev/stdin', 'rb').read().split())))",
        SUM,
        "passed",
    ),
    "no other name is one of a standard file": ("open('/dev/stdin/')", SUM, "runtime_error"),
    "/dev/stdin by fileinput": (
        "import fileinput\nfor line in fileinput.input('/dev/stdin'):\n"
        "    print(sum(map(int, line.split())))",
        SUM,
        "passed",
    ),
    "/dev/stdout": (
        "out = open('/dev/stdout', 'w')\nprint('3', file=out, flush=True)\nprint('4')",
        {"kind": "stdin", "cases": [{"input": "", "output": "3\n4\n"}]},
        "passed",
    ),
    "/dev/stderr is not the output": (
        "open('/dev/stderr', 'w').write('4')\nprint('3')",
        {"kind": "stdin", "cases": [{"input": "", "output": "3"}]},
        "passed",
    ),
    # functions of programs with and without a class
    "function by a class": (
        "class Solution:\n    def f(self, x: List[int]) -> int: return sum(x)",
        function(([[1, 2]], 3), ([[4]], 4)),
        "passed",
    ),
    "function by a static method": (
        "class Solution:\n    @staticmethod\n    def f(x): return x",
        function(([3], 3)),
        "passed",
    ),
    "function next to another class": (
        "class Solution:\n    def g(self): pass\ndef f(x): return x",
        function(([3], 3)),
        "passed",
    ),
    "a function of the imports is not the program's": (
        "x = gcd(4, 6)",
        function(([4, 6], 2), entry="gcd"),
        "runtime_error",
    ),
    "nor is it by LiveCodeBench's rule": (
        "x = gcd(4, 6)",
        function(([4, 6], 2), entry="gcd", rule="livecodebench"),
        "runtime_error",
    ),
    "a function that the program imports": (
        "from math import gcd",
        function(([4, 6], 2), entry="gcd"),
        "passed",
    ),
    "a method named as what it calls": (
        "class Solution:\n    def gcd(self, a, b): return gcd(a, b)",
        function(([4, 6], 2), entry="gcd", rule="livecodebench"),
        "passed",
    ),
    "an import that builtins have": (
        "class Solution:\n    def f(self, x): return pow(x, 5, 7)",
        function(([2], 4), rule="livecodebench"),
        "passed",
    ),
    "method by a plain function": (
        "def f(x): return x",
        function(([3], 3), entry="Solution().f"),
        "passed",
    ),
    "neither function nor class": (
        "def g(x): return x",
        function(([3], 3), entry="Solution().f"),
        "runtime_error",
    ),
    "a method is no function of a check": (
        "class Solution:\n    def f(self): return 3",
        check("assert candidate() == 3"),
        "runtime_error",
    ),
    # LiveCodeBench
    "imports of LiveCodeBench": (
        "d = deque(map(int, sys.stdin.read().split()))\nd = copy.deepcopy(d)\n"
        "print(gcd(*d), json.dumps([median(d)]), bisect.bisect([1, 2], 1), defaultdict(int)[0])",
        livecodebench("2 [3.0] 1 0", "2 4\n"),
        "passed",
    ),
    "no imports elsewhere": (
        "d = deque()",
        {"kind": "stdin", "cases": [{"input": "", "output": ""}]},
        "runtime_error",
    ),
    "imports of LiveCodeBench for a method": (
        "class Solution:\n    def f(self, x: List[int]) -> float: return median(x)",
        function(([[3, 1, 2]], 2), entry="Solution().f", rule="livecodebench"),
        "passed",
    ),
    "deep recursion": (
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\nprint(depth(20000))",
        livecodebench("20000"),
        "passed",
    ),
    "deep recursion of a method": (
        "class Solution:\n    def f(self, n): return 0 if n == 0 else 1 + self.f(n - 1)",
        function(([20000], 20000), entry="Solution().f", rule="livecodebench"),
        "passed",
    ),
    "leaves with status 1": ("print(3)\nsys.exit(1)", livecodebench("3"), "passed"),
    "leaves with status 1 elsewhere": (
        "import sys\nprint(3)\nsys.exit(1)",
        {"kind": "stdin", "cases": [{"input": "", "output": "3"}]},
        "runtime_error",
    ),
    "leaves with a status of the sandbox": ("print(4)\nexit(96)", livecodebench("3"), "wrong"),
    "raises after the right output": (
        "print(3)\nraise ValueError",
        livecodebench("3"),
        "runtime_error",
    ),
    "leaves a method": (
        "class Solution:\n    def f(self, x): sys.exit(0)",
        function(([1], None), entry="Solution().f", rule="livecodebench"),
        "runtime_error",
    ),
    "the last block under main": (
        "def main(): print(3)\nif __name__ == '__main__':\n    main()",
        livecodebench("3"),
        "passed",
    ),
    "a block under main before the end": (
        "if __name__ == '__main__':\n    print(3)\nx = 4",
        livecodebench("3"),
        "wrong",
    ),
    "variables of a program are local": (
        "n = 0\ndef count():\n    global n\n    n += 1\ncount()\nprint(n)",
        livecodebench("1"),
        "runtime_error",
    ),
    "returns at its top level": ("print(3)\nreturn", livecodebench("3"), "passed"),
    "imports alone": ("import os", livecodebench(""), "runtime_error"),
    "no Python": ("print(", livecodebench(""), "runtime_error"),
    "blank lines before the output": ("print('\\n\\n3')", livecodebench("3"), "passed"),
    "an expected output that begins with a blank line": (
        "print(3)",
        livecodebench("\n3\n"),
        "passed",
    ),
    "a blank line within": ("print('3\\n\\n4')", livecodebench("3\n4"), "wrong"),
    "a value next to the float": (
        "class Solution:\n    def f(self, x): return x + 0.0000001",
        function(([0.5], 0.5), entry="Solution().f", rule="livecodebench"),
        "wrong",
    ),
    "a tuple for a list": (
        "class Solution:\n    def f(self, x): return (x, 2)",
        function(([1], [1, 2]), entry="Solution().f", rule="livecodebench"),
        "passed",
    ),
    "tuples within a list": (
        "class Solution:\n    def f(self, x): return [(x, 2)]",
        function(([1], [[1, 2]]), entry="Solution().f", rule="livecodebench"),
        "wrong",
    ),
}


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def pool(request: pytest.FixtureRequest) -> Iterator[CodePool]:
    if problem := local.problem_of(request.param):
        pytest.skip(f"{request.param} does not work on this machine: {problem}")
    with CodePool(limits=LIMITS, sandbox=request.param, workers=2) as pool:
        yield pool


def fenced(program: str) -> str:
    return f"Thinking.\n```python\n{program}\n```\n<conf> Confidence: 0.9"


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_failure_has_its_category(pool: CodePool, name: str) -> None:
    program, tests, expected = CASES[name]
    category, *only = expected.split()
    if (
        only and pool.level not in only
    ):  # scratch files and child processes: bubblewrap only (docs/programs.md)
        category = "forbidden"
    verdict = pool.submit(program, tests).result()
    if name in ("child", "copies a file", "other packages") and pool.level not in only:
        assert verdict.correct == (name == "other packages" and verdict.category == "passed")
        return
    assert verdict.category == category, verdict
    assert verdict.correct == (category == "passed")


def test_the_last_words_of_a_program_are_the_detail(pool: CodePool) -> None:
    """stderr is flushed at the end as stdout is."""
    program = "import sys\nsys.stderr.write('out of ideas')\nsys.exit(3)"
    assert "out of ideas" in pool.submit(program, SUM).result().detail


def test_a_response_without_a_program_is_wrong(pool: CodePool) -> None:
    for text in (
        "",
        "print(3)",
        "```python\nprint(3)",
        "```python\n\n```",
        "<conf> 1\n```\nprint(3)\n```",
    ):
        assert pool.submit(extract_program(text), SUM).result().category == "no_program"


@pytest.mark.parametrize("role", ["program", "checker"])
def test_a_dead_server_is_replaced_and_its_program_judged_again(pool: CodePool, role: str) -> None:
    with SandboxSession(pool.level, LIMITS) as session:
        tests = checked_tests(check("assert candidate(1) == 1"))
        assert session.judge("def f(x): return x", tests).correct == 1
        session.servers[role].process.kill()  # type: ignore[index]
        assert session.judge("def f(x): return x", tests).correct == 1


def test_a_server_killed_in_the_middle_is_replaced(pool: CodePool) -> None:
    import threading

    with SandboxSession(pool.level, LIMITS) as session:  # type: ignore[arg-type]
        tests = checked_tests({"kind": "stdin", "cases": [{"input": "", "output": "1"}]})
        server = session.server("program")
        threading.Timer(0.5, server.process.kill).start()
        assert session.judge("import time\ntime.sleep(1.5)\nprint(1)", tests).correct == 1
        assert session.replaced == 1


def test_submit_returns_before_the_verdict(pool: CodePool) -> None:
    future = pool.submit(
        "import time\ntime.sleep(1)\nprint(1)",
        {"kind": "stdin", "cases": [{"input": "", "output": "1"}]},
    )
    assert not future.done()
    assert future.result().correct == 1


def test_closing_leaves_no_process_and_cancels_what_waits() -> None:
    level = local.choose("auto")
    before = set(below(os.getpid(), "sandbox.guest"))
    pool = CodePool(limits=CodeLimits(test_seconds=1, program_seconds=1), sandbox=level, workers=1)
    futures = [pool.submit("while True: pass", SUM) for _ in range(3)]
    time.sleep(0.1)
    pool.close()
    assert all(future.done() for future in futures)
    assert futures[-1].cancelled()
    assert set(below(os.getpid(), "sandbox.guest")) <= before


def test_a_killed_judge_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL of the process that judges ends its sandboxes and the programs in them."""
    script = (
        "from megatron_dcpo.sandbox.program_judge import *\n"
        "pool = CodePool(limits=CodeLimits(test_seconds=300, program_seconds=300), workers=1)\n"
        "f = pool.submit('print(1, flush=True)\\nwhile True: pass', {'kind': 'stdin', 'cases': "
        "[{'input': '', 'output': ''}]})\n"
        "import time, os; time.sleep(3); print(os.getpid(), flush=True); f.result()\n"
    )
    import sys

    judge = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert judge.stdout is not None
    judge.stdout.readline()
    started = below(judge.pid)
    assert len(started) >= 2
    judge.send_signal(signal.SIGKILL)
    judge.wait()
    judge.stdout.close()
    assert not left_after(started, 20)


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (3, "must be an object"),
        ({}, "kind of tests None is unknown"),
        (
            {"kind": "pytest"},
            "kind of tests 'pytest' is unknown; it must be one of stdin, check, asserts, function",
        ),
        (
            {"kind": "stdin", "rule": "apps", "cases": [{"input": "", "output": ""}]},
            "rule 'apps' of stdin",
        ),
        ({**asserts("f()"), "rule": "livecodebench"}, "rule 'livecodebench' of assert"),
        ({"kind": "stdin"}, "at least one case"),
        ({"kind": "stdin", "cases": []}, "at least one case"),
        ({"kind": "stdin", "cases": [3]}, "case 1: must be an object"),
        ({"kind": "stdin", "cases": [{"input": "1"}]}, "case 1: output is missing"),
        ({"kind": "stdin", "cases": [{"input": 1, "output": "1"}]}, "input must be text, got int"),
        (
            {"kind": "stdin", "cases": [{"input": "", "output": ""}], "atol": "x"},
            "atol 'x' must be a number, 0 or more",
        ),
        ({"kind": "check", "entry_point": "f"}, "code is missing"),
        ({"kind": "check", "code": "x"}, "entry_point is missing"),
        ({"kind": "check", "code": " ", "entry_point": "f"}, "code is empty"),
        ({"kind": "asserts", "asserts": []}, "at least one string"),
        ({"kind": "asserts", "asserts": [" "]}, "the tests are empty"),
        (
            {"kind": "function", "entry_point": "f", "cases": [{"args": [1]}]},
            "must have args (a list) and expected",
        ),
        (
            {"kind": "function", "entry_point": "f", "cases": [{"args": [len], "expected": 1}]},
            "cannot be sent",
        ),
    ],
)
def test_malformed_tests_are_refused_by_name(tests: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"line 7[:,] ") as error:
        checked_tests(tests, "line 7")
    assert message in str(error.value)


def test_tests_that_are_no_python() -> None:
    with pytest.raises(UserError, match="file:3: code is not Python"):
        check_syntax(
            checked_tests({"kind": "check", "entry_point": "f", "code": "def check(c"}), "file:3"
        )


@pytest.mark.parametrize(
    ("output", "expected", "atol", "same"),
    [
        ("3", "3\n", 0, True),
        ("3 \n\n", "3", 0, True),
        ("\n3", "3", 0, True),
        ("3", "\n\n3\n", 0, True),
        ("3\n\n4", "3\n4", 0, False),
        ("\n \n", "", 0, True),
        ("\n3", "", 0, False),
        (" ", "\n", 0, True),
        (" 3", "3", 0, True),
        ("3\r\n4", "3\n4", 0, True),
        ("1.50", "1.5", 0, True),
        ("1e3", "1000", 0, True),
        ("0.30000001", "0.3", 0, False),
        ("0.30000001", "0.3", 1e-6, True),
        ("1 2", "1  2", 0, True),
        ("a b", "a  b", 0, False),
        ("yes", "YES", 0, False),
        ("nan", "nan", 0, True),
        ("inf", "1", 1, False),
        ("1 2 3", "1 2", 0, False),
        ("1_000", "1000", 0, False),
        ("1 2", "1 2 3", 0, False),
        ("1\n\n\n2", "1", 0, False),
        ("", "", 0, True),
        ("", "0", 0, False),
        ("1000000", "1000001", 1e-6, True),
        ("1\n2", "1 2", 0, False),
    ],
)
def test_outputs_are_compared_by_their_rule(
    output: str, expected: str, atol: float, same: bool
) -> None:
    assert same_output(output.encode(), expected, atol) is same


def test_limits_that_are_none_are_refused() -> None:
    for limits in (
        {"test_seconds": 0},
        {"memory_mb": 5},
        {"processes": -1},
        {"program_seconds": float("nan")},
    ):
        with pytest.raises(UserError):
            CodeLimits(**limits)
    with pytest.raises(UserError, match="workers"):
        CodePool(workers=0)
    with pytest.raises(UserError, match="sandbox 'docker'"):
        CodePool(sandbox="docker")


def test_an_environment_below_tmp_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's launcher mounts its own /tmp over the one in which the packages lie."""
    if problem := local.problem_of("bubblewrap"):
        pytest.skip(f"bubblewrap does not work on this machine: {problem}")
    with tempfile.TemporaryDirectory(dir="/tmp") as site:
        Path(site).chmod(0o755)  # any user may walk there, unlike pytest's own directories
        (Path(site) / "sortedcontainers").mkdir()
        monkeypatch.setattr(bubblewrap, "site_packages", lambda: site)
        assert local.problem_of.__wrapped__("bubblewrap") == ""


def test_no_sandbox_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "problem_of", lambda level: f"no {level}")
    with pytest.raises(UserError, match=r"apt-get install bubblewrap.*--sandbox unsafe") as error:
        local.choose("auto")
    assert "\n" not in str(error.value)
    assert local.choose("unsafe") == "unsafe"


def test_dcpo_judge_prints_a_verdict_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        (fenced(program), tests, category)
        for program, tests, category in CASES.values()
        if " " not in category
    ][:12]
    rows.append(("no program", SUM, "no_program"))
    file = tmp_path / "programs.jsonl"
    file.write_text(
        "\n".join(json.dumps({"response": text, "tests": tests}) for text, tests, _ in rows)
        + "\n\n"
    )
    assert main(["judge", "--programs", str(file), "--json", "--timeout", "10"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        {"correct": int(category == "passed"), "category": category} for _, _, category in rows
    ]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        '{"response": 3}',
        '{"response": "x"}',
        '{"response": "x", "tests": {"kind": "y"}}',
        '{"response": "x", "tests": {"kind": "check", "entry_point": "f", "code": "def ("}}',
    ],
)
def test_malformed_lines_are_named(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "programs.jsonl"
    file.write_text(json.dumps({"response": "x", "tests": SUM}) + "\n" + line + "\n")
    assert main(["judge", "--programs", str(file), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{file}:2" in captured.err
    assert len([line for line in captured.err.splitlines() if "error" in line]) == 1
