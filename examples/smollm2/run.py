"""A real language model: SmolLM2-135M before RL, after GRPO, after DCPO. ``make smollm2 [SEED=k]``
prepares and runs it.

``--methods grpo,dcpo,dcpo_proper,rlcr`` adds the other two. What is left in --out:
``examples/comparison.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from comparison import Comparison, compare  # noqa: E402

# The policy is sampled as it was trained: temperature 1, nothing cut off.
SAMPLING = (
    "--template chat --temperature 1.0 --top-p 1.0 --top-k 0 --max-tokens 72 "
    "--batch-size 128 --engine transformers"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the trainings")
    parser.add_argument(
        "--prepared", type=Path, default=Path("runs/smollm2"), help="what prepare.sh left"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--methods", default="grpo,dcpo")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="options for all trainings"
    )
    args = parser.parse_args()
    data = args.prepared / "data"
    comparison = Comparison(
        folder=HERE,
        out=args.out,
        policy=args.prepared / "policy",
        methods=tuple(args.methods.split(",")),
        seed=args.seed,
        heldout=data / "test.jsonl",
        train=data / "train.jsonl",
        fitted=250,
        sampling=tuple(SAMPLING.split()),
        overrides=(
            f"model.path={args.prepared / 'policy'}",
            f"data.path={data / 'train.jsonl'}",
            f"evaluation.benchmarks=validation={data / 'validation.jsonl'}",
            *args.overrides,
        ),
    )
    compare(comparison, args.workers)


if __name__ == "__main__":
    main()
