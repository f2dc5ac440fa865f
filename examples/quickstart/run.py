"""The quickstart: one over-confident policy, two trainings, one picture. ``make quickstart
[SEED=k]`` runs it.

GRPO and DCPO with a proper score start from the same policy, differ in ``objective`` only and train
for ``STEPS`` steps. Base and results are evaluated on the same held-out problems; the lookup of a
policy says of every problem how often the policy is right on others of its type.

``--whole``: 250 steps, DCPO as the paper has it as well, and two rows that need no training: GRPO,
recalibrated, is GRPO's policy whose confidence is a logistic regression on its log-probs, fitted on
responses to training problems, and once more with the type of the problem, which is the baseline
of a stated confidence. ``make quickstart-table`` (``--table``): all of it for three seeds, and
their means. ``make quickstart-moe`` (``--whole --experts``): from a Qwen3-MoE of four experts.
What is left in --out: ``examples/comparison.py``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from comparison import Comparison, compare, means  # noqa: E402

STEPS = 100
SEEDS_OF_THE_TABLE = (1, 2, 3)
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
    parser.add_argument(
        "--whole", action="store_true", help="three trainings of 250 steps, and recalibration"
    )
    parser.add_argument(
        "--table", action="store_true", help="the whole for seeds 1, 2 and 3, and their means"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="options for all trainings"
    )
    args = parser.parse_args()
    if not args.table:
        compare(comparison_of(args, seed=args.seed, out=args.out), args.workers)
        return
    folders = [args.out / f"seed_{seed}" for seed in SEEDS_OF_THE_TABLE]
    for seed, folder in zip(SEEDS_OF_THE_TABLE, folders, strict=True):
        if not (folder / "summary.json").is_file():
            compare(comparison_of(args, seed=seed, out=folder), args.workers)
    means(folders, args.out / "means.json")


def comparison_of(args: argparse.Namespace, seed: int, out: Path) -> Comparison:
    """Return what is compared under one seed."""
    is_whole = args.whole or args.table
    policy = HERE / "moe" / "policy" if args.experts else HERE / "policy"
    start = (f"model.path={policy}", "rollout.routing_replay=true") if args.experts else ()
    length = () if is_whole else (f"training.steps={STEPS}",)
    return Comparison(
        folder=HERE,
        out=out,
        policy=policy,
        methods=("grpo", "dcpo", "dcpo_proper") if is_whole else ("dcpo_proper", "grpo"),
        seed=seed,
        heldout=HERE / "data" / "heldout.jsonl",
        train=HERE / "data" / "train.jsonl",
        fitted=500 if is_whole else 0,
        sampling=tuple(SAMPLING.split()),
        overrides=(*start, *length, *args.overrides),
    )


if __name__ == "__main__":
    main()
