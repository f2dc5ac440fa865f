"""``dcpo judge``: is each prediction its reference, does each program pass its tests?

Of pairs, it also prints where the verifier and plain string equality disagree: these pairs are
worth reading.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, add_judging_arguments, positive_int, program_limits
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import printable
from megatron_dcpo.types import CONFIDENCE_TAG

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "judge",
        help=VERBS["judge"],
        description="Judge every line of a file as training and evaluation do. A prediction is a "
        "whole response, whose "
        "last complete \\boxed{...} before the confidence line is read, or a bare answer. A "
        "program is the last complete "
        "fenced block before the confidence line; it runs in a sandbox (docs/programs.md).",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--pairs",
        metavar="FILE",
        help="JSON lines with prediction and reference ('-': standard input)",
    )
    what.add_argument(
        "--programs",
        metavar="FILE",
        help="JSON lines with response and tests ('-': standard input)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="one JSON line per line, in order, with correct",
    )
    add_judging_arguments(parser)
    for name, old_name in (
        ("test_seconds", "--timeout"),
        ("program_seconds", "--total-timeout"),
    ):
        parser.add_argument(old_name, dest=name, type=float, help=argparse.SUPPRESS)
    parser.add_argument(
        "--workers",
        type=positive_int,
        metavar="N",
        help="programs at a time (default: the cores)",
    )
    parser.add_argument(
        "--show",
        type=int,
        default=20,
        help="disagreements with string equality shown (default 20)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.programs:
        return _judge_programs(args)
    if args.verifier not in (None, "math"):
        return _judge_by_function(args)
    judged = judge_pairs(_read_pairs(args.pairs))
    if args.json:
        for pair in judged:
            print(
                json.dumps(
                    {
                        "correct": pair.correct,
                        "answer": pair.answer,
                        "string_equal": pair.string_equal,
                    }
                )
            )
        return 0
    numbers = report(judged)
    print(
        f"{numbers['pairs']} pairs, {numbers['correct']} correct, {numbers['string_equal']} equal "
        "as strings"
    )
    for row in numbers["disagreements"][: args.show]:
        verdict = "accepted" if row["correct"] else "rejected"
        print(
            f"  {verdict} {row['count']}x  {row['answer']!r}  against  {row['reference']!r}"
        )
    hidden = len(numbers["disagreements"]) - args.show
    if hidden > 0:
        print(f"  ... and {hidden} more (--show)")
    return 0


def _judge_by_function(args: argparse.Namespace) -> int:
    """Judge each prediction by a verifier of questions or the user's: its text before the
    confidence line, with the other columns.
    """
    from megatron_dcpo.config import JudgingConfig, checked
    from megatron_dcpo.data.files import read_json_lines
    from megatron_dcpo.judging.answers import Attempt
    from megatron_dcpo.judging.blocks import split_text
    from megatron_dcpo.judging.function_verifier import check_error_rate
    from megatron_dcpo.judging.verifiers import verifiers

    names = (
        "verifier",
        "threshold",
        "sandbox",
        "test_seconds",
        "program_seconds",
        "memory_mb",
    )
    given = {
        name: vars(args)[name] for name in names if vars(args).get(name) is not None
    }
    judging = checked(given, JudgingConfig, "dcpo judge")
    verifier, form = verifiers(judging, {})(args.verifier)
    attempts = []
    for where, row in read_json_lines(args.pairs):
        if not isinstance(row.get("prediction"), str) or "reference" not in row:
            raise UserError(
                f"{where}: expected an object with prediction (text) and reference"
            )
        reasoning = split_text(row["prediction"], CONFIDENCE_TAG).reasoning.decode(
            errors="replace"
        )
        columns = {"answer": row["reference"], **row}
        attempts.append(
            Attempt(form.extract(reasoning), str(row["reference"]), reasoning, columns)
        )
    outcomes = verifier(attempts)
    for outcome in outcomes if args.json else ():
        print(
            json.dumps(
                {
                    "correct": outcome.correct,
                    "category": outcome.category,
                    **(outcome.logged or {}),
                }
            )
        )
    if not args.json:
        right, failed = (
            sum(map(bool, column))
            for column in list(zip(*outcomes, strict=True))[:2] or ((), ())
        )
        print(
            f"{len(outcomes)} predictions, {right} correct, {failed} not judged (verifier_error)"
        )
    check_error_rate(outcomes, judging.max_error_rate, args.pairs)
    return 0


def _judge_programs(args: argparse.Namespace) -> int:
    """Print one line per program, printed in order as soon as it is known."""
    from megatron_dcpo.judging.answers import extract_program
    from megatron_dcpo.sandbox.judge import CodePool
    from megatron_dcpo.sandbox.tests import check_syntax, checked_tests

    limits = program_limits(args)
    if args.program_seconds is None:
        limits = replace(limits, program_seconds=10 * limits.test_seconds)
    rows = _read_programs(args.programs)
    for where, _, tests in rows:
        check_syntax(checked_tests(tests, where), where)
    workers = args.workers if args.workers is not None else len(os.sched_getaffinity(0))
    counts: Counter[str] = Counter()
    with CodePool(
        limits=limits, sandbox=args.sandbox or "auto", workers=workers
    ) as pool:
        print(f"sandbox: {pool.level}", file=sys.stderr)
        futures = [
            (where, pool.submit(extract_program(response), tests, where))
            for where, response, tests in rows
        ]
        for where, future in futures:
            verdict = future.result()
            counts[verdict.category] += 1
            if args.json:
                print(
                    json.dumps(
                        {"correct": verdict.correct, "category": verdict.category}
                    ),
                    flush=True,
                )
            elif not verdict.correct:
                print(printable(f"  {where}: {verdict.category}: {verdict.detail}"))
    if not args.json:
        print(
            f"{len(rows)} programs: "
            + ", ".join(f"{count} {name}" for name, count in counts.most_common())
        )
    return 0


def _read_programs(path: str) -> list[tuple[str, str, Any]]:
    """Return where each stands, for messages; the response; its tests."""
    from megatron_dcpo.data.files import read_json_lines

    rows = []
    for where, row in read_json_lines(path):
        if not isinstance(row.get("response"), str) or "tests" not in row:
            raise UserError(
                f"{where}: expected an object with response (text) and tests"
            )
        rows.append((where, row["response"], row["tests"]))
    return rows


def _read_pairs(path: str) -> list[tuple[str, str]]:
    from megatron_dcpo.data.files import read_json_lines

    pairs = []
    for where, row in read_json_lines(path):
        try:
            pairs.append((_text(row["prediction"]), _text(row["reference"])))
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{where}: expected an object with prediction and reference "
                f"({type(error).__name__}: {error})"
            ) from None
    return pairs


def _text(value: object) -> str:
    """Return a field as text: numbers as they are written, a missing answer as an empty one."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return json.dumps(value)
    raise TypeError(f"neither text nor number: {value!r:.40}")


@dataclass(frozen=True)
class JudgedPair:
    """``answer`` is what was read in the prediction; ``string_equal``: it is the reference, blanks
    aside.
    """

    answer: str
    reference: str
    correct: bool
    string_equal: bool


def read_answer(prediction: str) -> str:
    """Return the last complete box before the confidence line; a prediction without any box is a
    bare answer itself.

    In training and evaluation a response without a box is wrong. Here pairs of bare answers are
    judged as well, so only a text that has begun a box and not closed it has no answer.
    """
    from megatron_dcpo.judging.answers import extract_boxed

    before, _, _ = prediction.partition(CONFIDENCE_TAG)
    boxed = extract_boxed(before)
    if boxed is not None:
        return boxed.strip()
    return "" if "\\boxed" in before else before.strip()


def judge_pairs(pairs: Sequence[tuple[str, str]]) -> list[JudgedPair]:
    """Judge (prediction, reference) pairs, in order."""
    from megatron_dcpo.judging.math.pool import equivalent_many

    answers = [read_answer(prediction) for prediction, _ in pairs]
    references = [reference.strip() for _, reference in pairs]
    verdicts = equivalent_many(list(zip(answers, references, strict=True)))
    return [
        JudgedPair(
            answer,
            reference,
            correct,
            "".join(answer.split()) == "".join(reference.split()),
        )
        for answer, reference, correct in zip(
            answers, references, verdicts, strict=True
        )
    ]


def report(judged: Sequence[JudgedPair]) -> dict[str, Any]:
    """Return counts, and the distinct pairs on which the two disagree, the most frequent first."""
    differing = Counter(
        (p.answer, p.reference, p.correct)
        for p in judged
        if p.correct != p.string_equal
    )
    return {
        "pairs": len(judged),
        "correct": sum(pair.correct for pair in judged),
        "string_equal": sum(pair.string_equal for pair in judged),
        "disagreements": [
            {
                "answer": answer,
                "reference": reference,
                "correct": correct,
                "count": count,
            }
            for (answer, reference, correct), count in differing.most_common()
        ],
    }
