"""Forecasts whose probability is known: problems of the quickstart, each with an outcome that is
drawn once, true with probability .7. ``python outcomes.py OUT.jsonl``.

The problem tells nothing of the outcome, so the best that a policy can state is .7, always.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

PROBLEMS = Path(__file__).parents[1] / "quickstart" / "data" / "train.jsonl"
PROBABILITY = 0.7


def rows() -> list[dict[str, object]]:
    """Return the problems with an outcome each."""
    generator = random.Random(1)
    found = []
    for line in PROBLEMS.read_text().splitlines():
        problem = json.loads(line)
        happened = generator.random() < PROBABILITY
        found.append(
            {
                "id": problem["id"],
                "problem": problem["problem"],
                "outcome": happened,
                "type": problem["type"],
            }
        )
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows()))
