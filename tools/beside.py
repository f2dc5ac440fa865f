"""The same metrics of two trainings side by side, step by step, and their means.

    python tools/beside.py FIRST/metrics.jsonl SECOND/metrics.jsonl

Steps that only one of them has are left out, and metrics that a step lacks, by name. The status is
1 if no step is in both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

METRICS = {
    "reward/accuracy": "accuracy",
    "confidence/mean": "confidence",
    "length/mean": "length",
    "loss/policy": "loss",
    "grad_norm/total": "gradient",
    "engine/kl": "engine KL",
    "time/step": "seconds",
}


def rows(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics by step; nothing of a file that is not there."""
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line for line in lines}


def compared(first: dict[int, dict[str, float]], second: dict[int, dict[str, float]]) -> list[str]:
    """Return the lines: a step each, one of means, and the metrics that are not compared."""
    steps = sorted(first.keys() & second.keys())
    names = [name for name in METRICS if all(name in first[s] and name in second[s] for s in steps)]
    lines = []
    for step in steps:
        parts = [f"{METRICS[n]} {first[step][n]:.4g} / {second[step][n]:.4g}" for n in names]
        lines.append(f"step {step}: " + ", ".join(parts))
    means = []
    for name in names:
        pair = [sum(rows[s][name] for s in steps) / len(steps) for rows in (first, second)]
        means.append(f"{METRICS[name]} {pair[0]:.3g} / {pair[1]:.3g}")
    lines.append(f"{len(steps)} steps, means: " + ", ".join(means))
    left_out = [METRICS[name] for name in METRICS if name not in names]
    if left_out:
        lines.append(f"not in every step of both: {', '.join(left_out)}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    first, second = rows(args.first), rows(args.second)
    if not first.keys() & second.keys():
        print(f"no step in both: {len(first)} of the first, {len(second)} of the second")
        return 1
    print("\n".join(compared(first, second)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
