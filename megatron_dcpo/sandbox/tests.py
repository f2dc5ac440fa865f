"""The tests of a programming task (four kinds, checked once), the rule for its output, and the
verdict's categories.

Numbers are compared by the rule of the data they come from, hence in two places: outputs here, as
LiveCodeBench does (line by line, first as text, then as exact decimals); values of function calls
in ``guest/test_runner.py``, as evalplus does, or as LiveCodeBench does if the tests name its rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any, Literal, get_args

from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox.guest.program import LIVECODEBENCH
from megatron_dcpo.sandbox.guest.rpc import CATEGORY_OF_EXIT, Encoder, Unsendable

_WORD = re.compile(r"\S+")
KINDS = ("stdin", "check", "asserts", "function")
# How tests want their programs run and compared beyond what their kind says: as LiveCodeBench's
# runner (lcb_runner/evaluation/testing_util.py at this commit) does.
RULES = (LIVECODEBENCH,)
LIVECODEBENCH_COMMIT = "28fef95"
# The names that solutions of LiveCodeBench, LeetCode and the like use without importing them.
_USUAL_MODULES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json"
)
_USUAL_NAMES = [f"from {name} import *" for name in [*_USUAL_MODULES.split(), "builtins", "typing"]]
USUAL_IMPORTS = "\n".join([*_USUAL_NAMES, f"import {', '.join(_USUAL_MODULES.split())}"])
LIVECODEBENCH_IMPORTS = (
    f"{USUAL_IMPORTS}\nsys.setrecursionlimit(50000)\nsys.set_int_max_str_digits(50000)"
)


def checked_tests(tests: object, where: str = "tests") -> dict[str, Any]:
    """Return the tests as the judge uses them. Raises UserError naming ``where`` for anything that
    is not one of these:

    * ``{"kind": "stdin", "cases": [{"input": str, "output": str}, ...]}``, perhaps ``atol``
    * ``{"kind": "check", "entry_point": str, "code": "def check(candidate): ..."}``
    * ``{"kind": "asserts", "asserts": [str, ...]}`` or ``"code": str``, perhaps ``entry_point``
    * ``{"kind": "function", "entry_point": str, "cases": [{"args": [...], "kwargs": {...},
    "expected": ...}, ...]}``,
      perhaps ``atol``

    ``setup`` (or ``prompt_prefix``): the task's own code, such as imports and ``class ListNode``,
    which is run before the program and before the tests, each in their process. A program for tests
    of a function without one finds :data:`USUAL_IMPORTS`.

    ``"rule": "livecodebench"``, of ``stdin`` and ``function``: the program finds
    :data:`LIVECODEBENCH_IMPORTS`; one that reads standard input is run by ``program.called_once``,
    and its exit status does not count; values must be equal.
    """
    if not isinstance(tests, Mapping):
        raise UserError(f"{where}: tests must be an object, got {type(tests).__name__}")
    kind = tests.get("kind")
    if kind not in KINDS:
        raise UserError(
            f"{where}: kind of tests {kind!r} is unknown; it must be one of {', '.join(KINDS)}"
        )
    rule = _rule(tests, where)
    setup = _setup(tests, where)
    known: dict[str, Any] = {
        "kind": kind,
        "rule": rule,
        "imports": _imports(tests, setup),
        "setup": setup,
    }
    if kind == "stdin":
        cases = _cases(tests, where)
        known["cases"] = [
            (
                _text(case, "input", f"{where}, case {case_no}"),
                _text(case, "output", f"{where}, case {case_no}"),
            )
            for case_no, case in enumerate(cases, start=1)
        ]
        known["atol"] = _atol(tests, where)
        return known
    if kind != "asserts" or tests.get("entry_point"):
        known["entry_point"] = _filled(tests, "entry_point", where)
    if kind == "function":
        known.update(_function_cases(_cases(tests, where), where), atol=_atol(tests, where))
        return known
    asserts = tests.get("asserts")
    if kind == "asserts" and asserts is not None:
        if (
            not isinstance(asserts, list)
            or not asserts
            or not all(isinstance(line, str) for line in asserts)
        ):
            raise UserError(f"{where}: asserts must be a list of at least one string")
        known["code"] = "\n".join(
            [*([_text(tests, "code", where)] if "code" in tests else []), *asserts]
        )
    else:
        known["code"] = _filled(tests, "code", where)
    if not known["code"].strip():
        raise UserError(f"{where}: the tests are empty")
    return known


def _rule(tests: Mapping[str, Any], where: str) -> str | None:
    rule = tests.get("rule")
    if rule is None:
        return None
    if rule not in RULES or tests["kind"] not in ("stdin", "function"):
        raise UserError(
            f"{where}: rule {rule!r:.60} of {tests['kind']} tests is unknown; "
            f"stdin and function tests may have one of {', '.join(RULES)}"
        )
    return str(rule)


def _setup(tests: Mapping[str, Any], where: str) -> str:
    setup = _text(tests, "setup", where, default="")
    return setup or _text(tests, "prompt_prefix", where, default="")


def _imports(tests: Mapping[str, Any], setup: str) -> str:
    """Return the code whose names a program finds as if they were builtin."""
    if tests.get("rule") == LIVECODEBENCH:
        return LIVECODEBENCH_IMPORTS
    if tests["kind"] == "function" and not setup:
        return USUAL_IMPORTS
    return ""


def check_syntax(tests: Mapping[str, Any], where: str = "tests") -> None:
    """Raise UserError when the code of checked tests is not Python. For loaders: it takes as long
    as the code is.
    """
    for name in ("setup", "code"):
        try:
            compile(tests.get(name) or "", f"<{name}>", "exec")
        except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
            raise UserError(
                f"{where}: {name} is not Python: {error or type(error).__name__}"
            ) from None


def _function_cases(cases: list[Mapping[str, Any]], where: str) -> dict[str, Any]:
    encoder = Encoder((), None)
    encoded = []
    for case_no, case in enumerate(cases, start=1):
        args = case.get("args", [])
        kwargs = case.get("kwargs") or {}
        if (
            not isinstance(args, list | tuple)
            or not isinstance(kwargs, Mapping)
            or "expected" not in case
        ):
            raise UserError(
                f"{where}, case {case_no}: must have args (a list) and expected, perhaps "
                "kwargs (an object)"
            )
        try:
            parts = {"args": list(args), "kwargs": dict(kwargs), "expected": case["expected"]}
            encoded.append({name: encoder.encode(value) for name, value in parts.items()})
        except Unsendable as error:
            raise UserError(
                f"{where}, case {case_no}: {error} cannot be sent to a program"
            ) from None
    return {"cases": encoded}


def _cases(tests: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    cases = tests.get("cases")
    if not isinstance(cases, list | tuple) or not cases:
        raise UserError(f"{where}: cases must be a list of at least one case")
    for case_no, case in enumerate(cases, start=1):
        if not isinstance(case, Mapping):
            raise UserError(
                f"{where}, case {case_no}: must be an object, got {type(case).__name__}"
            )
    return list(cases)


def _text(row: Mapping[str, Any], name: str, where: str, default: str | None = None) -> str:
    value = row.get(name, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        if name not in row:
            problem = "is missing"
        else:
            problem = f"must be text, got {type(value).__name__}"
        raise UserError(f"{where}: {name} {problem}")
    return value


def _filled(row: Mapping[str, Any], name: str, where: str) -> str:
    text = _text(row, name, where)
    if not text.strip():
        raise UserError(f"{where}: {name} is empty")
    return text


def _atol(tests: Mapping[str, Any], where: str) -> float:
    value = tests.get("atol") or 0.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < float("inf")
    ):
        raise UserError(f"{where}: atol {value!r} must be a number, 0 or more")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{where}: atol is not a tolerance: too large for a number") from None


def same_output(output: bytes, expected: str, atol: float = 0.0) -> bool:
    """Return whether two outputs are the same. Lines are compared without white space at their
    ends, and the texts without empty lines at their beginning and end.

    A line that differs as text is right if both split into the same number of numerals that are
    pairwise equal as exact decimals (``1.50`` is ``1.5``, ``1e3`` is ``1000``), or within ``atol``,
    absolute or relative, if the tests state one. The comparison goes line by line and numeral by
    numeral to the first difference, so in addition to ``output`` it needs the memory of its longest
    line.
    """
    lines = _lines(output)
    for goal in expected.strip().split("\n"):
        line = next(lines, None)
        if line is None or not (line == goal.strip() or _same_numbers(line, goal, atol)):
            return False
    return not any(lines)


def _lines(output: bytes) -> Iterator[str]:
    """Yield the lines from the first one that is not empty on; one empty line of an output without
    text.
    """
    at = 0
    begun = False
    while at <= len(output):
        end = output.find(b"\n", at)
        end = len(output) if end < 0 else end
        line = output[at:end].decode(errors="replace").strip()
        begun = begun or line != ""
        if begun:
            yield line
        at = end + 1
    if not begun:
        yield ""


def _same_numbers(line: str, expected: str, atol: float) -> bool:
    pairs = zip_longest(_WORD.finditer(line), _WORD.finditer(expected))
    try:
        return bool(expected.strip()) and all(
            word is not None
            and goal is not None
            and _close(_number(word[0]), _number(goal[0]), atol)
            for word, goal in pairs
        )
    except (InvalidOperation, ValueError, OverflowError):
        return False


def _number(word: str) -> Decimal:
    """Parse a number. Raises InvalidOperation for anything but a numeral. ``1_000`` is Python's way
    to write one, not an output's.
    """
    return Decimal("" if "_" in word else word)


def _close(value: Decimal, goal: Decimal, atol: float) -> bool:
    if value == goal:
        return True
    if not atol or not (value.is_finite() and goal.is_finite()):
        return False
    return abs(float(value) - float(goal)) <= atol * max(1.0, abs(float(goal)))


Category = Literal[
    "passed",
    "wrong",  # ran to its end, and a test says no
    "runtime_error",  # an exception, a non-zero exit status, or an end before the tests were done
    "timeout",
    "memory",
    "output_limit",
    "forbidden",  # ended by what the sandbox refused it
    "no_program",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
# Exit statuses of a program's process (``guest/rpc.py``) and signals (SIGXFSZ, SIGSYS).
EXITS: dict[int, Category] = {**CATEGORY_OF_EXIT, -25: "output_limit", -31: "forbidden"}  # type: ignore[dict-item]


@dataclass(frozen=True)
class CodeVerdict:
    """``correct`` is R; ``category`` says why not; ``detail`` says more, in words."""

    correct: int
    category: Category
    detail: str = ""
