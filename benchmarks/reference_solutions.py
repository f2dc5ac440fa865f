"""Which programming problems can be solved: every reference solution of a data set through the
judge.

    python benchmarks/reference_solutions.py FILE... [--workers 2] [--every 1] [--sandbox auto]

Printed per file: problems, solutions that pass, seconds, and every solution that does not, with its
reason. The exit status is 1 when less than 99 % of a file pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))
from measurement import DATA, QUICK, Measurement, absent

from megatron_dcpo.data.code_problems import unpack_tests
from megatron_dcpo.data.datasets import Loading, usable_rows
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.program_judge import judge_programs
from tests.helpers.data import reference_solution


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="only every n-th problem")
    parser.add_argument("--sandbox", default="auto")
    parser.add_argument("--test-seconds", type=float, default=CodeLimits.test_seconds)
    arguments = parser.parse_args()
    limits = CodeLimits(test_seconds=arguments.test_seconds)
    enough = True
    for file in arguments.files:
        start = time.perf_counter()
        verdicts = judged(file, arguments.every, limits, arguments.sandbox, arguments.workers)
        failed = [(name, verdict) for name, verdict in verdicts if verdict.correct != 1]
        share = 1 - len(failed) / max(1, len(verdicts))
        seconds, passed = time.perf_counter() - start, len(verdicts) - len(failed)
        print(f"{file}: {passed} of {len(verdicts)} pass ({share:.2%}), {seconds:.0f} s")
        for name, verdict in failed:
            print(f"  row {name}: {verdict.category}: {verdict.detail}")
        enough = enough and bool(verdicts) and share >= 0.99
    return 0 if enough else 1


def judged(
    file: str, every: int, limits: CodeLimits, sandbox: str, workers: int
) -> list[tuple[str, Any]]:
    """Row and verdict of every reference solution that the file has."""
    names, items = [], []
    for index, row in enumerate(read_rows(file)):
        solution = reference_solution(row)
        if index % every or solution is None:
            continue
        for record in usable_rows([(index, row)], Loading("code", file)).records:
            if record.tests is not None:
                names.append(f"{index + 1} ({row.get('task_id', 'no id')})")
                items.append((solution, unpack_tests(record.tests)))
    return list(
        zip(
            names,
            judge_programs(items, limits=limits, sandbox=sandbox, workers=workers),
            strict=True,
        )
    )


def measurements() -> Iterator[Measurement]:
    """Every tenth problem of LeetCodeDataset's test set (``make reference-solutions`` takes
    all).
    """
    file = DATA / "leetcodedataset" / "LeetCodeDataset-v0.3.1-test.jsonl.gz"
    at = {"goal": 0.99, "at_least": True}
    if not file.exists():
        yield absent(
            "reference_solutions",
            "solutions",
            "solutions judged",
            f"no {file.name} in {file.parent}",
            **at,
        )
        return
    every = 100 if QUICK else 10
    verdicts = judged(str(file), every, CodeLimits(), "auto", 2)
    passed = sum(verdict.correct == 1 for _, verdict in verdicts)
    yield Measurement(
        "reference_solutions",
        passed,
        len(verdicts),
        "solutions that pass",
        "solutions judged",
        **at,
    )


if __name__ == "__main__":
    raise SystemExit(main())
