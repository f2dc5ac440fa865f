"""Which programming problems can be solved: every reference solution of a data set through the judge.

    python benchmarks/reference_solutions.py FILE... [--workers 2] [--every 1] [--sandbox auto]

Printed per file: problems, solutions that pass, seconds, and every solution that does not, with its reason. The exit
status is 1 when less than 99 % of a file pass.
"""

from __future__ import annotations

import argparse
import time

from megatron_dcpo.data.code_problems import code_problem, reference_solution
from megatron_dcpo.data.datasets import read_rows
from megatron_dcpo.sandbox.judge import CodeLimits, judge_programs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="only every n-th problem")
    parser.add_argument("--sandbox", default="auto")
    parser.add_argument("--test-seconds", type=float, default=CodeLimits.test_seconds)
    arguments = parser.parse_args()
    limits = CodeLimits(test_seconds=arguments.test_seconds)
    enough = True
    for file in arguments.files:
        names, items = [], []
        for index, row in enumerate(read_rows(file)):
            solution = reference_solution(row)
            problem = code_problem(row, f"{file}: row {index + 1}")
            if index % arguments.every or solution is None or problem is None:
                continue
            names.append(f"{index + 1} ({row.get('task_id', 'no id')})")
            items.append((solution, problem.tests))
        start = time.perf_counter()
        verdicts = judge_programs(items, limits=limits, sandbox=arguments.sandbox, workers=arguments.workers)
        failed = [(name, v) for name, v in zip(names, verdicts, strict=True) if v.correct != 1]
        share = 1 - len(failed) / max(1, len(items))
        print(
            f"{file}: {len(items) - len(failed)} of {len(items)} pass ({share:.2%}), {time.perf_counter() - start:.0f} s"
        )
        for name, verdict in failed:
            print(f"  row {name}: {verdict.category}: {verdict.detail}")
        enough = enough and bool(items) and share >= 0.99
    return 0 if enough else 1


if __name__ == "__main__":
    raise SystemExit(main())
