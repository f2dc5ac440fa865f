"""Demonstrations of a tool's form: the text that the quickstart's policy was made of, with calls.

    python examples/calculator/demonstrations.py --out runs/calculator/demonstrations.jsonl
    dcpo sft --config examples/calculator/sft.yaml

A share of the solutions (``--calls``) begins with a call of the calculator and what it shows.
Nothing is learned from the calculator's tokens: their weight is 0. Where it shows a product, the
solution's own reasoning is left out and its box holds that product. The confidence is drawn as in
the other text and does not look at the call: what a call is good for, and how sure to be after one,
is left to RL. No held-out problem is in it. With ``--between`` a share of the rows are confidences
before the end, as turns.yaml has the policy state them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from agent import ERROR, call_for, shown_for

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import make_policy  # noqa: E402

WRONG = 0.25  # the share of wrong solutions, as in the last stage of the policy's own text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=96_000)
    parser.add_argument("--calls", type=float, default=0.3)
    parser.add_argument(
        "--between", type=float, default=0.0, help="share with a confidence before the end"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    held_out = make_policy.read_jsonl(QUICKSTART / "data" / "heldout.jsonl")
    pools = {
        kind: make_policy.without(make_policy.problems_of(kind), held_out)
        for kind in make_policy.TYPES
    }
    draw = make_policy.supervised_text(pools)
    rows = []
    for problem, solution in draw(args.rows, WRONG, None, rng):
        if args.between and rng.random() < args.between:
            rows.append(stated_before_the_end(problem, solution, rng))
            continue
        is_call = rng.random() < args.calls
        make = with_call if is_call else without_call
        rows.append(make(problem, solution))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} demonstrations: {args.out}")


def without_call(problem: str, solution: str) -> dict[str, object]:
    return {"prompt": problem, "response": solution}


def stated_before_the_end(problem: str, solution: str, rng: random.Random) -> dict[str, object]:
    """Return the form of a confidence after a call, or after the first token that follows what the
    calculator shows. The number is the solution's: it looks at neither.
    """
    call = call_for(problem)
    text = call
    if rng.random() < 0.5:
        shown = shown_for(call)
        text += shown + (solution[0] if shown == ERROR else " \\boxed{")
    confidence = solution.rpartition(" ")[2]
    return {"prompt": f"{problem}{text}\n<conf> Confidence:", "response": f" {confidence}"}


def with_call(problem: str, solution: str) -> dict[str, object]:
    call = call_for(problem)
    shown = shown_for(call)
    if shown != ERROR:
        _, end_of_box, confidence = solution.partition("}")
        solution = f" \\boxed{{{shown[::-1]}{end_of_box}{confidence}"
    of_calculator = {"start": len(call), "end": len(call) + len(shown), "weight": 0.0}
    return {"prompt": problem, "response": call + shown + solution, "spans": [of_calculator]}


if __name__ == "__main__":
    main()
