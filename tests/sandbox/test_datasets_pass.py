"""Every canonical solution of HumanEval+ passes; every one whose return value is changed fails.

``DCPO_ALL_CODE=1`` (``make code-data``) adds MBPP+ and LeetCodeDataset, which take long.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.sandbox.judge import CodeLimits, CodeVerdict, judge_programs
from megatron_dcpo.sandbox.local import problem_of

SLOW = CodeLimits(test_seconds=120.0, program_seconds=600.0, memory_mb=4096, output_mb=64)
ALL = pytest.mark.skipif(os.environ.get("DCPO_ALL_CODE") != "1", reason="long; make code-data runs it")


def rows(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as stream:
        return [json.loads(line) for line in stream]


def mutated(program: str, entry: str) -> str:
    """The program with ``entry`` wrapped so that what it returns is another value of the same kind where there is one."""
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


def verdicts(items: list[tuple[str, dict[str, Any]]]) -> list[CodeVerdict]:
    if problem_of("bubblewrap") and problem_of("landlock"):
        pytest.skip(f"no sandbox works on this machine: {problem_of('bubblewrap')}; {problem_of('landlock')}")
    return judge_programs(items, limits=SLOW)


def humaneval_plus(folder: Path) -> list[tuple[str, str, str, dict[str, Any]]]:
    """Name, canonical program, entry point and tests. The released check of problem 32 has its arguments mixed up
    (it raises for every program): its intention is used."""
    found = []
    for row in rows(folder / "humanevalplus" / "HumanEvalPlus-OriginFmt.jsonl.gz"):
        code = row["test"].replace("_poly(*candidate(*inp), inp)", "abs(_poly(*inp, candidate(*inp)))")
        tests = {"kind": "check", "entry_point": row["entry_point"], "code": code}
        found.append((row["task_id"], row["prompt"] + row["canonical_solution"], row["entry_point"], tests))
    return found


def test_humaneval_plus(shared_data: Path) -> None:
    problems = humaneval_plus(shared_data)
    assert len(problems) == 164
    right = verdicts([(program, tests) for _, program, _, tests in problems])
    assert [problem[0] for problem, verdict in zip(problems, right, strict=True) if not verdict.correct] == []
    wrong = verdicts([(mutated(program, entry), tests) for _, program, entry, tests in problems])
    assert [problem[0] for problem, verdict in zip(problems, wrong, strict=True) if verdict.correct] == []


def mbpp_plus(folder: Path) -> list[tuple[str, str, str, dict[str, Any]]]:
    """As above. Of problem 255 the input with 1.7 million combinations of 77 is left out: gigabytes to compare."""
    names = {row["task_id"]: row["entry_point"] for row in rows(folder / "mbppplus" / "MbppPlus.jsonl.gz")}
    found = []
    for row in rows(folder / "mbppplus" / "MbppPlus-OriginFmt.jsonl.gz"):
        entry = names[f"Mbpp/{row['task_id']}"]
        code = row["test"]
        if row["task_id"] == 255:
            code = code.replace("\nfor i, ", "\ninputs = [inp for inp in inputs if inp[1] < 70]\nfor i, ")
        tests = {"kind": "asserts", "entry_point": entry, "code": code}
        found.append((f"Mbpp/{row['task_id']}", row["code"], entry, tests))
    return found


@ALL
def test_mbpp_plus(shared_data: Path) -> None:
    problems = mbpp_plus(shared_data)
    assert len(problems) == 378
    right = verdicts([(program, tests) for _, program, _, tests in problems])
    assert [(p[0], verdict) for p, verdict in zip(problems, right, strict=True) if not verdict.correct] == []
    wrong = verdicts([(mutated(program, entry), tests) for _, program, entry, tests in problems])
    assert [problem[0] for problem, verdict in zip(problems, wrong, strict=True) if verdict.correct] == []


@ALL
@pytest.mark.parametrize("name", ["v0.2.0-train", "v0.2.0-test", "v0.3.1-test"])
def test_leetcode_dataset(name: str, shared_data: Path) -> None:
    """At least 99 in 100 reference solutions pass; the others are printed."""
    problems = rows(shared_data / "leetcodedataset" / f"LeetCodeDataset-{name}.jsonl.gz")
    items = []
    for row in problems:
        tests = {"kind": "check", "entry_point": row["entry_point"], "code": row["test"], "setup": row["prompt"]}
        items.append((row["completion"], tests))
    failed = [(row["task_id"], v) for row, v in zip(problems, verdicts(items), strict=True) if not v.correct]
    print(name, len(problems), failed)
    assert len(failed) <= 0.01 * len(problems)
