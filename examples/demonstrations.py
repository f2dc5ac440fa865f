"""Demonstrations of the format that RL rewards, from answers that a model gave itself.

    dcpo evaluate --model MODEL --benchmarks train=train.jsonl --repeats 4 --out runs/answers
    python examples/demonstrations.py --samples runs/answers/samples.jsonl --out shown.jsonl
    dcpo sft --config examples/quickstart/sft.yaml data.path=shown.jsonl

Of every problem the first right answers are kept (rejection sampling), at most ``--per-problem`` of
them. Behind each stands a confidence drawn uniformly from 0.00 to 1.00, which does not look at the
answer: the model learns the form, and RL finds every number possible and none meaning anything.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path

from megatron_dcpo.evaluation.samples import read_samples
from megatron_dcpo.types import CONFIDENCE_TAG


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-problem", type=int, default=2)
    parser.add_argument("--marker", default=CONFIDENCE_TAG)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chosen = random.Random(args.seed)
    kept: Counter[tuple[str, str]] = Counter()
    rows = []
    for sample in read_samples(args.samples):
        finished = sample.response.finish_reason == "stop"
        enough = kept[sample.problem_key] >= args.per_problem
        if not sample.correct or not finished or enough:
            continue
        kept[sample.problem_key] += 1
        answer = (sample.response.text or "").partition(args.marker)[0].rstrip()
        confidence = chosen.randint(0, 100) / 100
        response = f"{answer}\n{args.marker} Confidence: {confidence:.2f}"
        rows.append({"prompt": sample.prompt.problem, "response": response})
    if not rows:
        sys.exit(f"{args.samples}: no answer is right; nothing to demonstrate")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} demonstrations of {len(kept)} problems: {args.out}")


if __name__ == "__main__":
    main()
