"""How much faster are programs judged than with an interpreter per test? Both in one run, on the
same programs.

    python benchmarks/code_judge.py [--data ../shared/data] [--programs 500] [--tests 10] [--sandbox
    auto]

Programs: HumanEval+'s canonical solutions, and the same with a changed return value. Tests: the
first ``--tests`` inputs of each problem, with what the canonical solution gives. The naive way
writes program and test to a file and calls ``subprocess.run([python, file])`` for every test until
one fails, without any isolation, as many at a time as the pool has workers. Verdicts must be the
same. ``--numpy`` gives the naive way evalplus's own comparison, which imports NumPy.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measurement import DATA, QUICK, Measurement, absent

from megatron_dcpo.sandbox.judge import CodeLimits, CodePool

_CHANGED = """
_right = {entry}
def {entry}(*args):
    value = _right(*args)
    return not value if isinstance(value, bool) else [value]
"""
_COMPARE = """
def _same(out, exp):
    if isinstance(out, tuple): out = list(out)
    if isinstance(exp, tuple): exp = list(exp)
    if out == exp: return True
    if isinstance(exp, float): return isinstance(out, (int, float)) and abs(out - exp) <= 1e-6 + 1e-7 * abs(exp)
    return isinstance(exp, list) and isinstance(out, list) and len(out) == len(exp) and all(map(_same, out, exp))
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--tests", type=int, default=10)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sandbox", default="auto")
    parser.add_argument("--numpy", action="store_true")
    args = parser.parse_args()
    file = args.data / "humanevalplus" / "HumanEvalPlus.jsonl.gz"
    sys.exit(
        0
        if compare(file, args.programs, args.tests, args.workers, args.sandbox, args.numpy).same
        else 1
    )


def compare(
    file: Path, programs: int, tests: int, workers: int, sandbox: str, numpy: bool
) -> Measurement:
    """Both on the same programs, one after the other."""
    items = _items(file, programs, tests)
    count = sum(len(cases) for _, _, cases in items)
    print(f"{len(items)} programs, {count} tests, {workers} workers, load {os.getloadavg()[0]:.1f}")
    limits = CodeLimits(test_seconds=60, program_seconds=300)
    with CodePool(limits=limits, sandbox=sandbox, workers=workers) as pool:
        start = time.perf_counter()
        ours = _judged(pool, items)
        seconds = time.perf_counter() - start
        print(
            f"{pool.level}: {seconds:.2f} s with the start of the servers, "
            f"{len(items) / seconds:.1f} programs/s"
        )
    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as threads:
        naive = list(threads.map(lambda item: _naive(item, numpy), items))
    slow = time.perf_counter() - start
    print(
        f"subprocess per test: {slow:.2f} s, {len(items) / slow:.1f} programs/s, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(
        f"same verdicts: {ours == naive} ({sum(ours)} of {len(ours)} right); ratio "
        f"{slow / seconds:.1f}"
    )
    unit, other = (
        f"s (wall time of {len(items)} programs, {count} tests)",
        "an interpreter per test, not isolated",
    )
    return Measurement("code_judge", seconds, slow, unit, other, goal=0.5, same=ours == naive)


def measurements() -> Iterator[Measurement]:
    file = DATA / "humanevalplus" / "HumanEvalPlus.jsonl.gz"
    if file.exists():
        programs = 4 if QUICK else 100
        yield compare(file, programs, 10, 2, "auto", False)
    else:
        yield absent("code_judge", "s", "an interpreter per test", f"no {file}", goal=0.5)


def _items(path: Path, programs: int, tests: int) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Program, entry point and cases. Problems whose answer is not unique are compared by the
    canonical one.
    """
    found = []
    with gzip.open(path, "rt") as stream:
        for line in stream:
            row = json.loads(line)
            right = row["prompt"] + row["canonical_solution"]
            names: dict[str, Any] = {}
            exec(right, names)
            inputs = [*row["base_input"], *(row["plus_input"] or [])][:tests]
            function = names[row["entry_point"]]
            cases = [
                {"args": given, "expected": function(*json.loads(json.dumps(given)))}
                for given in inputs
            ]
            changed = right + _CHANGED.format(entry=row["entry_point"])
            found += [(right, row["entry_point"], cases), (right + "\n", row["entry_point"], cases)]
            found += [
                (changed, row["entry_point"], cases),
                (right + "\n\n", row["entry_point"], cases),
            ]
    return found[:programs]


def _judged(pool: CodePool, items: list[tuple[str, str, list[dict[str, Any]]]]) -> list[int]:
    futures = []
    for program, entry, cases in items:
        tests = {"kind": "function", "entry_point": entry, "cases": cases}
        futures.append(pool.submit(program, tests))
    return [future.result().correct for future in futures]


def _naive(item: tuple[str, str, list[dict[str, Any]]], numpy: bool) -> int:
    program, entry, cases = item
    same = "import numpy\n" + _COMPARE if numpy else _COMPARE
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        for case in cases:
            file.seek(0)
            file.truncate()
            file.write(
                f"{program}\n{same}\nassert _same({entry}(*{case['args']!r}), "
                f"{case['expected']!r})\n"
            )
            file.flush()
            if subprocess.run(
                [sys.executable, file.name], capture_output=True, check=False
            ).returncode:
                return 0
    return 1


if __name__ == "__main__":
    main()
