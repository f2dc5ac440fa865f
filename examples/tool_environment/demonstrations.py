"""Demonstrations of a tool's form: the text that the quickstart's policy was made of, with calls of
the environment's calculator in Hermes' form; and that policy with a chat template that writes them.

    python examples/tool_environment/demonstrations.py --out runs/tool_environment
    dcpo sft --config examples/tool_environment/sft.yaml

A share of the solutions (``--calls``) begins with a call, the end of the policy's turn, and what
the calculator shows. Nothing is learned from the calculator's tokens: their weight is 0. Where it
shows a product, the solution's own reasoning is left out and its box holds that product. The
confidence is drawn as in the other text and does not look at the call: what a call is good for,
and how sure to be after one, is left to RL. With ``--between`` a share of the rows are confidences
behind a call, as turns.yaml has the policy state them.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import make_policy  # noqa: E402

WRONG = 0.25  # the share of wrong solutions, as in the last stage of the policy's own text
ERROR, DISPLAY = "E", 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=96_000)
    parser.add_argument("--calls", type=float, default=0.5)
    parser.add_argument(
        "--between", type=float, default=0.0, help="share with a confidence behind the call"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    pools = {kind: make_policy.problems_of(kind) for kind in make_policy.TYPES}
    draw = make_policy.supervised_text(pools)
    rows = []
    for problem, solution in draw(args.rows, WRONG, None, rng):
        if args.between and rng.random() < args.between:
            rows.append(stated_behind_the_call(problem, solution))
        elif rng.random() < args.calls:
            rows.append(with_call(problem, solution))
        else:
            rows.append({"prompt": problem, "response": solution})
    args.out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (args.out / "demonstrations.jsonl").write_text(lines)
    shutil.copytree(QUICKSTART / "policy", args.out / "policy", dirs_exist_ok=True)
    shutil.copy(HERE / "chat_template.jinja", args.out / "policy")
    print(f"{len(rows)} demonstrations, and the policy with its chat template: {args.out}")


def stated_behind_the_call(problem: str, solution: str) -> dict[str, object]:
    """Return the form of a confidence behind a call, in place of the end of its turn. The number
    is the solution's: it does not look at the call.
    """
    confidence = solution.rpartition(" ")[2]
    prompt = f"{problem}{call_for(problem)}\n<conf> Confidence:"
    return {"prompt": prompt, "response": f" {confidence}"}


def with_call(problem: str, solution: str) -> dict[str, object]:
    """Return a demonstration that asks the calculator for a problem, ``347*8=``."""
    a, b = factors_of(problem)
    call = call_for(problem) + make_policy.EOS  # the end of its turn
    product = str(a * b)
    shown = ERROR
    if len(product) <= DISPLAY:
        shown = product[::-1]
        _, end_of_box, confidence = solution.partition("}")
        solution = f" \\boxed{{{product}{end_of_box}{confidence}"
    of_calculator = {"start": len(call), "end": len(call) + len(shown), "weight": 0.0}
    return {"prompt": problem, "response": call + shown + solution, "spans": [of_calculator]}


def call_for(problem: str) -> str:
    """Return the call that asks the calculator for a problem, in Hermes' form."""
    a, b = factors_of(problem)
    arguments = json.dumps({"a": a, "b": b})
    return f'<tool_call>{{"name": "multiply", "arguments": {arguments}}}</tool_call>'


def factors_of(problem: str) -> tuple[int, int]:
    a, b = problem.rstrip("=").split("*")
    return int(a), int(b)


if __name__ == "__main__":
    main()
