"""Which programming problems does an answer pass that knows nothing of them? 66 universal answers,
every task.

    python benchmarks/universal_answers.py [FILE...] [--data ../shared/data] [--workers 2] [--json
    OUT]

An answer is a program that returns (for whole programs: prints) the same whatever the task: ``[]``,
``0``, ``None``, nan, an object that equals everything, its own argument, the zero of every type.
Printed per file: tasks, passes, and every pass with its answer and whether the data set's own
tests, as released, pass it too in a plain interpreter. The exit status is 1 when one passes here
that does not pass there.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import multiprocessing
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from measurement import DATA, QUICK, Measurement, absent

from megatron_dcpo.data.code_problems import unpack_tests
from megatron_dcpo.data.datasets import Loading, usable_rows
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.sandbox.guest import test_runner
from megatron_dcpo.sandbox.guest.program import Answers, define
from megatron_dcpo.sandbox.program_judge import judge_programs
from megatron_dcpo.sandbox.tests import checked_tests, same_output

FILES = (
    "humaneval/HumanEval.jsonl.gz",
    "humanevalplus/HumanEvalPlus-OriginFmt.jsonl.gz",
    "humanevalplus/HumanEvalPlus.jsonl.gz",
    "mbpp/mbpp.jsonl",
    "mbppplus/MbppPlus-OriginFmt.jsonl.gz",
    "leetcodedataset/LeetCodeDataset-v0.3.1-test.jsonl.gz",
    "leetcodedataset/LeetCodeDataset-v0.2.0-train.jsonl.gz",
    "leetcodedataset/LeetCodeDataset-v0.2.0-test.jsonl.gz",
    "code_rllm/test_leetcode.json",
    "code_rllm/test_codeforces.json",
    "code_rllm/test_code_contests.json",
)
CLASSES = """
import collections, decimal, fractions, math
def _yes(*a, **k): return True
_names = "eq ge le call contains bool instancecheck".split()
class Equal: __hash__ = None
class EqualInt(int): __hash__ = int.__hash__
class EqualText(str): __hash__ = str.__hash__
class EqualList(list): pass
class EqualFloat(float): __hash__ = float.__hash__
for _kind in (Equal, EqualInt, EqualText, EqualList, EqualFloat):
    for _name in _names: setattr(_kind, f"__{_name}__", _yes)
    _kind.__ne__ = _kind.__lt__ = _kind.__gt__ = lambda *a: False
class Meta(type):
    __eq__ = _yes
    __hash__ = type.__hash__
class EqualType(metaclass=Meta): pass
class Proxy:
    def __getattr__(self, name): return self
    def __call__(self, *a, **k): return self
    def __iter__(self): return iter(())
    def __len__(self): return 0
    def __getitem__(self, key): return self
def _first(a): return a[0] if a else None
def _array(*a, **k):
    import numpy
    return numpy.array(*a, **k)
"""
ANSWERS = (
    "[]",
    "0",
    "None",
    "float('nan')",
    "Equal()",
    "EqualInt()",
    "EqualText()",
    "EqualList()",
    "EqualFloat()",
    "EqualType",
    "EqualType()",
    "Proxy()",
    "_first(a)",
    "a",
    "list(a)",
    "a[-1]",
    "sorted(_first(a))",
    "len(_first(a))",
    "str(_first(a))",
    "1",
    "-1",
    "2",
    "True",
    "False",
    "''",
    "'0'",
    "'YES'",
    "'No'",
    "0.0",
    "-0.0",
    "1.0",
    "float('inf')",
    "-float('inf')",
    "()",
    "{}",
    "set()",
    "frozenset()",
    "b''",
    "[[]]",
    "[0]",
    "[None]",
    "['']",
    "[True]",
    "(0,)",
    "[float('nan')]",
    "{0: 0}",
    "0j",
    "range(0)",
    "iter([])",
    "(x for x in ())",
    "_yes",
    "object()",
    "bool",
    "NotImplemented",
    "...",
    "decimal.Decimal(0)",
    "decimal.Decimal('nan')",
    "fractions.Fraction(0)",
    "collections.Counter()",
    "collections.deque()",
    "collections.defaultdict(int)",
    "_array([])",
    "_array(0)",
    "_array([[]])",
    "_array(float('nan'))",
    "_array(True)",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the passes to this file")
    args = parser.parse_args()
    files = args.files or [path for name in FILES if (path := args.data / name).exists()]
    if not files:
        parser.error(f"no data set below {args.data}; name files or --data")
    print(f"{len(ANSWERS)} answers")
    record, alone = {}, 0
    with multiprocessing.get_context("fork").Pool(
        args.workers, _limit, maxtasksperchild=20
    ) as workers:
        for file in files:
            record[file.name] = passes = _passes(workers, file)
            alone += sum(not found["in_plain_python"] for found in passes)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{alone} passes that plain Python does not give")
    return 1 if alone else 0


def measurements() -> Iterator[Measurement]:
    """The two formats of HumanEval+ and MBPP+, minutes; all files: ``python
    benchmarks/universal_answers.py``.
    """
    files = [
        DATA / name
        for name in ("humanevalplus/HumanEvalPlus.jsonl.gz", "mbppplus/MbppPlus-OriginFmt.jsonl.gz")
    ]
    what = ("universal_answers", "passes that plain Python does not give", "tasks x answers")
    if lacking := [str(path) for path in files if not path.exists()]:
        yield absent(*what, f"no {lacking[0]}", goal=0.0)
        return
    with multiprocessing.get_context("fork").Pool(2, _limit, maxtasksperchild=20) as workers:
        passes = [_passes(workers, file) for file in files]
    alone = [entry for found in passes for entry in found if not entry["in_plain_python"]]
    tasks = sum(len(_tasks(file)[0]) for file in files)
    name, unit, other = what
    yield Measurement(
        name, len(alone), tasks * len(ANSWERS), unit, other, goal=0.0, raw={"passes": passes}
    )


def _tasks(file: Path) -> tuple[list[tuple[str, dict[str, Any], dict[str, Any]]], list[str]]:
    """Name, row and tests of every task; and the names of those whose tests assert nothing."""
    tasks, untested = [], []
    for index, row in enumerate(read_rows(str(file))):
        if QUICK and len(tasks) == 5:
            break
        name = str(row.get("task_id") or f"row {index + 1}")
        usable = usable_rows([(index, row)], Loading("code", str(file)))
        untested += [name] if usable.untested else []
        for record in usable.records:
            if record.tests is not None:
                tasks.append((name, dict(row), checked_tests(unpack_tests(record.tests))))
    return tasks, untested


def _passes(workers: Any, file: Path) -> list[dict[str, Any]]:
    start = time.perf_counter()
    tasks, untested = _tasks(file)
    found = []
    accepted = workers.imap(_accepted, [tests for _, _, tests in tasks], chunksize=1)
    for (name, row, tests), answers in zip(tasks, accepted, strict=True):
        programs = {answer: _program(tests, answer) for answer in answers}
        # once more as any other program, in the sandbox
        for answer, verdict in zip(
            answers, judge_programs([(p, tests) for p in programs.values()]), strict=True
        ):
            if verdict.correct:
                found.append(
                    {
                        "task": name,
                        "answer": answer,
                        "in_plain_python": _plain(row, programs[answer]),
                    }
                )
    print(
        f"{file.name}: {len(tasks)} tasks, {len(found)} passes of {len(tasks) * len(ANSWERS)}, in "
        f"{len({entry['task'] for entry in found})} tasks, "
        f"{sum(not entry['in_plain_python'] for entry in found)} not in plain Python, "
        f"left out {', '.join(untested) or 'none'}, {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    for entry in found:
        print(
            f"  {entry['task']}: "
            f"{entry['answer']}{'' if entry['in_plain_python'] else '  NOT IN PLAIN PYTHON'}"
        )
    return found


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    sys.setrecursionlimit(10_000)


def _accepted(tests: dict[str, Any]) -> list[str]:
    """The answers that pass ``tests``. The two ends of the sandbox's pipe are in this process:
    nothing here is hostile.
    """

    def late(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    client = _Here()
    names: dict[str, Any] = {}
    if tests["kind"] == "check":  # parsed once: megabytes of inputs
        names = test_runner._namespace(tests, client)
        test_runner._execute(tests["code"], names, client, "candidate", tests["entry_point"])
    passed = []
    for answer in ANSWERS:
        try:
            signal.setitimer(signal.ITIMER_REAL, 10.0, 1.0)
            try:
                if _accepts(tests, answer, client, names):
                    passed.append(answer)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException:  # also an alarm that comes while it is turned off
            signal.setitimer(signal.ITIMER_REAL, 0)
    return passed


def _accepts(tests: dict[str, Any], answer: str, client: _Here, names: dict[str, Any]) -> bool:
    """Raises what the tests raise."""
    if tests["kind"] == "stdin":
        made: dict[str, Any] = {}
        exec(CLASSES, made)
        outputs = [f"{eval(answer, made | {'a': (given,)})}\n" for given, _ in tests["cases"]]
        pairs = zip(outputs, tests["cases"], strict=True)
        return all(
            same_output(text.encode(errors="replace"), expected, tests["atol"])
            for text, (_, expected) in pairs
        )
    module, shared = define(
        {"program": _program(tests, answer), "imports": tests["imports"], "setup": tests["setup"]},
        "solution",
    )
    client.answer_with(Answers(module, shared, -1, 16 << 20))
    if tests["kind"] == "check":
        names["check"](test_runner.RemoteObject(client, {"name": tests["entry_point"]}, "function"))
        return client.calls > 0
    return test_runner.judge(tests, client)[0] == "passed"


class _Here(test_runner.ProgramClient):
    """The program's answers, encoded and decoded as they are between two processes."""

    def __init__(self) -> None:
        self._ends = socket.socketpair()
        super().__init__(self._ends[0].fileno(), 5.0, 16 << 20)

    def answer_with(self, answers: Answers) -> None:
        self.answers, self.waiting = answers, deque[dict[str, Any]]()
        self.calls, self.stopped, self.raised, self.remotes = 0, None, None, {}

    def prefetch(self, on: dict[str, Any], calls: Sequence[Sequence[Any]]) -> None:
        """One call at a time: most answers fail at the first."""

    def _send(self, message: dict[str, Any]) -> None:
        self.waiting.extend(json.loads(json.dumps(message))["calls"])

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.answers.answer(self.waiting.popleft())[4:])
        return answer


def _program(tests: Mapping[str, Any], answer: str) -> str:
    if tests["kind"] == "stdin":
        return f"{CLASSES}\nimport sys\na = (sys.stdin.read(),)\nprint({answer})\n"
    entry = str(tests.get("entry_point") or _called(tests))
    owner, _, method = entry.replace("()", "").rpartition(".")
    if owner:
        return f"{CLASSES}\nclass {owner}:\n    def {method}(self, *a, **k): return {answer}\n"
    return f"{CLASSES}\ndef {entry}(*a, **k): return {answer}\n"


def _called(tests: Mapping[str, Any]) -> str:
    """The function of an assert list: the first name that is called and is not Python's."""
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(str(tests["code"])))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return next((name for name in calls if not hasattr(builtins, name)), calls[0] if calls else "f")


def _plain(row: Mapping[str, Any], program: str) -> bool:
    """Whether the tests as the data set releases them pass ``program`` in one interpreter, without
    a sandbox. For formats whose tests are data (inputs and outputs), the comparison is ours and the
    answer is right.
    """
    if "test_list" in row and "test" not in row:
        tests = "\n".join(
            [str(row.get("test_setup_code") or ""), *row.get("test_imports", []), *row["test_list"]]
        )
    elif "test_list" in row:
        tests = str(row["test"])
    elif "test" in row and "entry_point" in row:
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        before = (
            str(row["prompt"])
            if "completion" in row
            else str(row["prompt"]).partition(f"def {row['entry_point']}")[0]
        )
        program = f"{before}\n{program}"
    else:
        return True
    text = f"{program}\n{tests}".encode(errors="surrogatepass")
    try:
        return (
            subprocess.run(
                [sys.executable, "-"], input=text, capture_output=True, timeout=60
            ).returncode
            == 0
        )
    except subprocess.TimeoutExpired:
        return False


if __name__ == "__main__":
    raise SystemExit(main())
