"""What is stated on average, step by step: ``python picture.py OUT.png NAME=RUN_DIR ...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from outcomes import PROBABILITY


def main(out: str, *named: str) -> None:
    """Draw the mean stated number of each run."""
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    for one in named:
        name, _, run = one.partition("=")
        rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
        axes.plot(
            [row["step"] for row in rows], [row["confidence/mean"] for row in rows], label=name
        )
    axes.axhline(PROBABILITY, color="black", linestyle=":", label="probability of the outcome")
    axes.set(xlabel="step", ylabel="stated, mean", ylim=(0, 1.02))
    axes.legend()
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main(*sys.argv[1:])
