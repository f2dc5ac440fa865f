"""``dcpo objective --input group.json``: rewards, advantages and loss of a few responses, without a
model.

These are the numbers that a training step would use, computed by the same code in float64. Use it
to check a method by hand, to compare with another implementation, and for golden tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers

DESCRIPTION = """\
Rewards, advantages and loss of a few responses, without a model: the numbers
that a training step would use, computed by the same code in float64. Use it to
check a method by hand, to compare with another implementation, and for golden
tests.
"""
INPUT = """\
the input:
  {"method": "dcpo", "options": {"lam": 0.5}, "responses": [
    {"version": 2, "prompt_id": "p", "correct": 1, "confidence": 0.9, "status": "ok",
     "boundary": 2, "length": 3,
     "logprobs": [-1.0, -0.5, -0.2], "old_logprobs": [-1.1, -0.5, -0.2]},
    {"version": 2, "prompt_id": "p", "correct": 0, "confidence": null, "status": "missing",
     "boundary": 1, "length": 2,
     "logprobs": [-0.7, -0.3], "old_logprobs": [-0.7, -0.3]}]}

  method, options  objective.name and the options of objective (dcpo config objective)
  version          2, the default
  prompt_id        responses with the same prompt_id form a group
  correct          0 or 1, or a reward between
  confidence       the stated confidence, or null
  status           ok, missing, multiple, unparsable, out_of_range, trailing_text, before_box
                   or truncated
  boundary, length the number of reasoning tokens, and of all tokens; without a marker the last
                   token (EOS) alone is the confidence block
  logprobs, old_logprobs   one per token, of the current policy and of the policy that sampled
  engine_logprobs, ref_logprobs, teacher_logprobs, entropy
                   one per token, if tis_level (old_logprobs: engine), kl_coef, distill_coef_*,
                   entropy_coef need them
  abstained        true or false (default), for ternary
"""


def add_parser(subparsers: Subparsers) -> argparse.ArgumentParser:
    """Register the verb; ``run`` is its main."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "objective",
        help=VERBS["objective"],
        description=DESCRIPTION,
        epilog=INPUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", required=True, metavar="FILE", help="JSON as below ('-': stdin)")
    parser.add_argument("--json", action="store_true", help="machine-readable output on stdout")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the result of ``args.input``. Raises :class:`UserError` for bad input."""
    from megatron_dcpo.objectives.worksheet import evaluate, read

    result = evaluate(read(args.input))
    print(json.dumps(result) if args.json else table(result))
    return 0


def table(result: Mapping[str, Any]) -> str:
    """Return one line per response for people."""
    names = ("target", "R", "R_c", "A reasoning", "A confidence")
    advantages = result["advantages"]
    rows = zip(
        result["targets"],
        result["R"],
        result["R_c"],
        advantages["reasoning"],
        advantages["confidence"],
        strict=True,
    )
    lines = ["  i " + "".join(f"{name:>14}" for name in names)]
    for number, row in enumerate(rows):
        cells = ["-" if value is None else f"{value:+.6f}" for value in row]
        lines.append(f"{number:>3} " + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join([*lines, f"loss {result['loss']:+.9f}"])
