"""Every canonical solution of HumanEval+ passes; every one whose return value is changed fails.

``DCPO_ALL_CODE=1`` (``make code-data``) adds MBPP+ and LeetCodeDataset, which take long.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.data.code_problems import unpack_tests
from megatron_dcpo.data.datasets import Loading, usable_rows
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.local import problem_of
from megatron_dcpo.sandbox.program_judge import CodeVerdict, judge_programs
from tests.helpers.data import reference_solution

SLOW = CodeLimits(test_seconds=120.0, program_seconds=600.0, memory_mb=4096, output_mb=64)
ALL = pytest.mark.skipif(
    os.environ.get("DCPO_ALL_CODE") != "1", reason="long; make code-data runs it"
)


def rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as stream:
        return [json.loads(line) for line in stream]


def mutated(program: str, entry: str) -> str:
    """The program with ``entry`` wrapped so that what it returns is another value of the same kind
    where there is one.
    """
    ast.parse(program)
    return f"""{program}

def _another(value):
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float, complex)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, (list, tuple)): return type(value)([*value, "x"])
    if isinstance(value, (set, frozenset)): return value | {{"x"}}
    if isinstance(value, dict): return {{**value, "x": 1}}
    return 1 if value is None else None

_right = {entry}
def {entry}(*args, **kwargs): return _another(_right(*args, **kwargs))
"""


def verdicts(items: list[tuple[str, Mapping[str, Any]]]) -> list[CodeVerdict]:
    if problem_of("bubblewrap") and problem_of("landlock"):
        pytest.skip(
            f"no sandbox works on this machine: {problem_of('bubblewrap')}; "
            f"{problem_of('landlock')}"
        )
    return judge_programs(items, limits=SLOW)


def problems_of(path: Path) -> list[tuple[str, str, str, Mapping[str, Any]]]:
    """Name, reference program, entry point and tests, as training and evaluation read them."""
    found = []
    for row in rows(path):
        for record in usable_rows([(0, row)], Loading("code", str(path))).records:
            assert record.tests is not None
            tests = unpack_tests(record.tests)
            solution = str(reference_solution(row))
            found.append((str(row["task_id"]), solution, str(tests["entry_point"]), tests))
    return found


def check_both(problems: list[tuple[str, str, str, Mapping[str, Any]]]) -> None:
    """Every reference passes; changed, it fails."""
    right = verdicts([(program, tests) for _, program, _, tests in problems])
    assert [
        (p[0], verdict) for p, verdict in zip(problems, right, strict=True) if not verdict.correct
    ] == []
    wrong = verdicts([(mutated(program, entry), tests) for _, program, entry, tests in problems])
    assert not [p[0] for p, verdict in zip(problems, wrong, strict=True) if verdict.correct]


def test_humaneval_plus(shared_data: Path) -> None:
    problems = problems_of(shared_data / "humanevalplus" / "HumanEvalPlus-OriginFmt.jsonl.gz")
    assert len(problems) == 164
    check_both(problems)


@ALL
def test_mbpp_plus(shared_data: Path) -> None:
    problems = problems_of(shared_data / "mbppplus" / "MbppPlus-OriginFmt.jsonl.gz")
    assert len(problems) == 375, "the tests of three assert nothing"
    check_both(problems)


@ALL
@pytest.mark.parametrize("name", ["v0.2.0-train", "v0.2.0-test", "v0.3.1-test"])
def test_leetcode_dataset(name: str, shared_data: Path) -> None:
    """At least 99 in 100 reference solutions pass; the others are printed."""
    problems = problems_of(shared_data / "leetcodedataset" / f"LeetCodeDataset-{name}.jsonl.gz")
    found = verdicts([(program, tests) for _, program, _, tests in problems])
    failed = [
        (problem[0], verdict)
        for problem, verdict in zip(problems, found, strict=True)
        if not verdict.correct
    ]
    print(name, len(problems), failed)
    assert len(failed) <= 0.01 * len(problems)
