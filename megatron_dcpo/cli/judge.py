"""``dcpo judge``: is each prediction its reference? And where the verifier and plain string equality disagree."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from megatron_dcpo.errors import UserError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "judge",
        help="judge pairs of prediction and reference",
        description="Judge every line of a file of pairs with the verifier of training and evaluation. A prediction is "
        "a whole response, whose last complete \\boxed{...} before the confidence line is read, or a bare answer.",
    )
    parser.add_argument(
        "--pairs", metavar="FILE", required=True, help="JSON lines with prediction and reference ('-': standard input)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line per pair, in order, with correct")
    parser.add_argument("--show", type=int, default=20, help="disagreements with string equality shown (default 20)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.judging.disagreements import judge_pairs, report

    judged = judge_pairs(_read_pairs(args.pairs))
    if args.json:
        for pair in judged:
            print(json.dumps({"correct": pair.correct, "answer": pair.answer, "string_equal": pair.string_equal}))
        return 0
    numbers = report(judged)
    print(f"{numbers['pairs']} pairs, {numbers['correct']} correct, {numbers['string_equal']} equal as strings")
    for row in numbers["disagreements"][: args.show]:
        verdict = "accepted" if row["correct"] else "rejected"
        print(f"  {verdict} {row['count']}x  {row['answer']!r}  against  {row['reference']!r}")
    hidden = len(numbers["disagreements"]) - args.show
    if hidden > 0:
        print(f"  ... and {hidden} more (--show)")
    return 0


def _read_pairs(path: str) -> list[tuple[str, str]]:
    """Lines are split at newlines only: an answer may hold other separators of Unicode."""
    try:
        stream = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
        with stream:
            lines = stream.read().decode(errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            pairs.append((_text(row["prediction"]), _text(row["reference"])))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: want an object with prediction and reference ({type(error).__name__}: {error})"
            ) from None
    return pairs


def _text(value: Any) -> str:
    """Numbers are taken as they are written; a missing answer is an empty one."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return json.dumps(value)
    raise TypeError(f"neither text nor number: {value!r:.40}")
