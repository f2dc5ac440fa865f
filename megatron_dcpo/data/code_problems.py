"""Programming problems: the tests of a row in one of four kinds.

- ``stdin``: input and expected output of a whole program (contest sets, LiveCodeBench);
- ``function``: arguments and expected value of ``entry_point`` (LiveCodeBench);
- ``check``: code that defines ``check(candidate)`` (HumanEval(+), MBPP+, LeetCodeDataset, rllm);
- ``asserts``: a list of assertions (MBPP).

``sandbox/`` runs them. Tests are kept packed (``pack_tests``), because one set can take megabytes.
The ``ground_truth`` of a problem is the key of its tests (``tests_key``).
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_dcpo.data import livecodebench
from megatron_dcpo.data.leetcode import LEETCODE_SETUP
from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox.tests import checked_tests

Tests = Mapping[str, Any]

READS_STDIN = (
    "The program reads its input from standard input and writes its output to standard output."
)
_ENTRY_OF_CHECK = re.compile(r"^check\(\s*(.+?)\s*\)\s*$", re.MULTILINE)
_ASSERTS = re.compile(r"\b(?:assert|raise)\b|\.assert[_A-Z]|\bfail\(")
# what reading tests of another form raises
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError, SyntaxError, RecursionError)


class CodeProblem(NamedTuple):
    """A statement as a policy reads it, without the request for a form of answer, and the tests."""

    statement: str
    tests: Tests


def pack_tests(tests: Tests) -> bytes:
    """Return the tests as compressed JSON with sorted keys, so that equal tests are equal bytes."""
    return zlib.compress(json.dumps(tests, sort_keys=True).encode(), level=3)


def unpack_tests(packed: bytes) -> Tests:
    tests: Tests = json.loads(zlib.decompress(packed))
    return tests


def tests_key(packed: bytes) -> str:
    """Return the name of a set of tests: ``tests:`` and 16 hex digits of a hash of their JSON. It
    is the same in every run.
    """
    return "tests:" + hashlib.sha256(zlib.decompress(packed)).hexdigest()[:16]


def code_problem(statement: str, tests: object, where: str) -> CodeProblem | None:
    """Return the problem of a statement and its tests in any known form; None for tests that any
    program passes.

    Raises :class:`UserError` for tests that cannot be read.
    """
    try:
        problem = _stated(statement.strip(), tests_of(tests))
    except _MALFORMED as error:
        raise UserError(
            f"{where}: unreadable tests ({type(error).__name__}: {str(error)[:200]})"
        ) from None
    checked_tests(problem.tests, where)
    return problem if _can_fail(problem.tests) else None


class PackedProblem(NamedTuple):
    """A statement, its packed tests and their key."""

    statement: str
    tests: bytes
    key: str


def packed_problem(statement: str, tests: object, where: str) -> PackedProblem | None:
    """Return :func:`code_problem` with its tests packed."""
    problem = code_problem(statement, tests, where)
    if problem is None:
        return None
    packed = pack_tests(problem.tests)
    return PackedProblem(problem.statement, packed, tests_key(packed))


def _can_fail(tests: Tests) -> bool:
    """Return whether the tests assert anything. Three tasks of MBPP+ compute whether the output is
    right and discard the result.
    """
    if tests["kind"] in ("stdin", "function"):
        return True
    texts = [str(tests.get("code", "")), *tests.get("asserts", ())]
    return any(_ASSERTS.search(text) for text in texts)


# ------------------------------------------------------------------------------- forms of tests


def tests_of(value: object) -> Tests:
    """Return tests, as JSON text or parsed: our format (with ``kind``), that of rllm, of PRIME
    (``inputs`` and ``outputs``) or of LiveCodeBench, or a list of assertions or of cases with
    ``input`` and ``output``.
    """
    value = _parsed(value)
    if isinstance(value, Mapping):
        if "kind" in value:
            return value
        if "functional" in value:
            return _functional(str(value["functional"]))
        if "test_cases" in value:
            return tests_of(value["test_cases"])
        inputs = _parsed(value["inputs"])
        outputs = _parsed(value["outputs"])
        cases = []
        for given, expected in zip(inputs, outputs, strict=True):
            cases.append({"input": given, "output": expected})
        return _cases(cases, value.get("fn_name"))
    if isinstance(value, Sequence) and not isinstance(value, str):
        cases = [_parsed(case) for case in value]
        if all(isinstance(case, str) for case in cases):
            return {"kind": "asserts", "asserts": cases}
        if livecodebench.has_form(cases):
            return livecodebench.tests_of_cases(cases, {})
        names = [case["fn_name"] for case in cases if case.get("fn_name")]
        return _cases(cases, names[0] if names else None)
    raise ValueError(f"tests are {type(value).__name__}, expected an object or a list")


def _cases(cases: Sequence[Mapping[str, Any]], name: str | None) -> Tests:
    """Return the tests with these inputs and outputs: those of a function if it has a ``name``, or
    else those of a whole program.
    """
    tested: list[dict[str, Any]] = []
    if name is None:
        for case in cases:
            given = _lines(case["input"])
            tested.append({"input": given, "output": _lines(case["output"])})
        return {"kind": "stdin", "cases": tested}
    outputs = [_parsed(case["output"]) for case in cases]
    # APPS and its descendants wrap every value of a set in a list of one.
    if all(isinstance(value, list) and len(value) == 1 for value in outputs):
        outputs = [value[0] for value in outputs]
    for case, expected in zip(cases, outputs, strict=True):
        arguments = _parsed(case["input"])
        if isinstance(arguments, list | tuple):
            arguments = list(arguments)
        else:
            arguments = [arguments]
        tested.append({"args": arguments, "kwargs": {}, "expected": expected})
    return {"kind": "function", "entry_point": name, "cases": tested}


def _lines(value: object) -> str:
    """Return the value as text; some sets have lists of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return str(value)


def _parsed(value: object) -> Any:  # noqa: ANN401 -- JSON that others wrote
    """Return the value in JSON text or a Python literal; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value


def _functional(code: str) -> Tests:
    """Return rllm's tests, which define ``check`` and call it in the last line with the object to
    test.
    """
    calls = list(_ENTRY_OF_CHECK.finditer(code))
    if not calls:
        raise ValueError("functional tests without a call of check(...)")
    entry = calls[-1][1]
    return {
        "kind": "check",
        "entry_point": entry,
        "code": code[: calls[-1].start()],
        "setup": LEETCODE_SETUP,
    }


def _stated(statement: str, tests: Tests) -> CodeProblem:
    """Return a problem whose statement says how the program is called."""
    says_stdin = "standard input" in statement or "stdin" in statement
    if tests.get("kind") == "stdin" and not says_stdin:
        statement = f"{statement}\n\n{READS_STDIN}"
    if tests.get("kind") == "function":
        owner, _, name = str(tests["entry_point"]).rpartition(".")
        if name not in statement:
            owner = owner.removesuffix("()")
            what = f"class `{owner}` with a method" if owner else "function"
            statement = f"{statement}\n\nWrite a {what} `{name}`."
    return CodeProblem(statement, tests)
