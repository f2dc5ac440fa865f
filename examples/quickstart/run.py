"""The quickstart: one over-confident policy, three trainings, one picture. ``make quickstart
[SEED=k]`` runs it.

``make quickstart-moe`` (``--experts``): the same from a Qwen3-MoE of four experts.

GRPO, DCPO (the paper's settings) and DCPO-proper start from the same policy and differ in
``objective`` only. Base and the three results are evaluated on the same held-out problems. Three
rows need no training: GRPO, recalibrated, is GRPO's policy whose confidence is a logistic
regression on its log-probs, fitted on responses to training problems, and once more with the type
of the problem, which is the bar for a stated confidence; the lookup of a policy says of every
problem how often the policy is right on others of its type. What is left in --out:
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
    "--template raw --temperature 1.0 --top-p 1.0 --top-k 0 --max-tokens 32 "
    "--batch-size 512 --engine transformers"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the trainings")
    parser.add_argument("--experts", action="store_true", help="start from a mixture of experts")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="options for all trainings"
    )
    args = parser.parse_args()
    policy = HERE / "moe" / "policy" if args.experts else HERE / "policy"
    start = (f"model.path={policy}", "rollout.routing_replay=true") if args.experts else ()
    comparison = Comparison(
        folder=HERE,
        out=args.out,
        policy=policy,
        methods=("grpo", "dcpo", "dcpo_proper"),
        seed=args.seed,
        heldout=HERE / "data" / "heldout.jsonl",
        train=HERE / "data" / "train.jsonl",
        fitted=500,
        sampling=tuple(SAMPLING.split()),
        overrides=(*start, *args.overrides),
    )
    compare(comparison, args.workers)


if __name__ == "__main__":
    main()
