"""``dcpo judge``: decide whether each prediction matches its reference, or each program passes its
tests.

For pairs it also prints those on which the verifier and plain string equality disagree, since they
are worth reading.
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

from megatron_dcpo.cli import (
    VERBS,
    add_judging_arguments,
    positive_int,
    refuse_given,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import printable
from megatron_dcpo.types import CONFIDENCE_TAG

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.sandbox.limits import CodeLimits


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "judge",
        help=VERBS["judge"],
        description="Judge every line of a file as training and evaluation do. A prediction is a "
        "whole response, whose last complete \\boxed{...} before the confidence line is read, or a "
        "bare answer. A program is the last complete fenced block before the confidence line; it "
        "runs in a sandbox (docs/programs.md).",
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
        help="print one JSON line per input line, in order, with correct",
    )
    add_judging_arguments(parser)
    for name, old_name in (("test_seconds", "--timeout"), ("program_seconds", "--total-timeout")):
        parser.add_argument(old_name, dest=name, type=float, help=argparse.SUPPRESS)
    parser.add_argument(
        "--workers",
        type=positive_int,
        metavar="N",
        help="programs to run at a time (default: the number of cores)",
    )
    parser.add_argument(
        "--show",
        type=int,
        metavar="N",
        help="number of disagreements with string equality to print (default 20)",
    )
    parser.set_defaults(run=run)


_SHOWN = 20
_LIMITS = ("sandbox", "test_seconds", "program_seconds", "memory_mb")


def run(args: argparse.Namespace) -> int:
    if args.programs:
        refuse_given(args, ["verifier", "threshold", "show"], "goes with --pairs")
        return _judge_programs(args)
    refuse_given(args, ["workers"], "goes with --programs")
    if args.verifier not in (None, "math"):
        refuse_given(args, ["show"], "goes with --pairs that are judged as mathematics")
        return _judge_by_function(args)
    refuse_given(args, ["threshold"], "goes with a --verifier that scores")
    refuse_given(args, _LIMITS, "goes with --programs, or with a --verifier of yours")
    shown = _SHOWN if args.show is None else args.show
    judged = judge_pairs(_read_pairs(args.pairs))
    if args.json:
        for pair in judged:
            values = {
                "correct": pair.correct,
                "answer": pair.answer,
                "string_equal": pair.string_equal,
            }
            print(json.dumps(values))
        return 0
    numbers = report(judged)
    print(
        f"{numbers['pairs']} pairs, {numbers['correct']} correct, "
        f"{numbers['string_equal']} equal as strings"
    )
    for row in numbers["disagreements"][:shown]:
        verdict = "accepted" if row["correct"] else "rejected"
        print(f"  {verdict} {row['count']}x  {row['answer']!r}  against  {row['reference']!r}")
    hidden = len(numbers["disagreements"]) - shown
    if hidden > 0:
        print(f"  ... and {hidden} more (--show)")
    return 0


def _judge_by_function(args: argparse.Namespace) -> int:
    """Judge each prediction by a verifier of questions, by a user's, or by several verifiers; they
    read the text before the confidence line and the other columns.
    """
    from megatron_dcpo.config import JudgingConfig, checked
    from megatron_dcpo.config.field_types import BUILT_IN, members
    from megatron_dcpo.data.answer_keys import outcome_of
    from megatron_dcpo.data.row_files import read_json_lines
    from megatron_dcpo.judging.answers import Attempt
    from megatron_dcpo.judging.blocks import split_text
    from megatron_dcpo.judging.verdicts import check_unjudged
    from megatron_dcpo.judging.verifiers import verifiers

    chosen = {}
    for name in ("verifier", "threshold", *_LIMITS):
        value = getattr(args, name, None)
        if value is not None:
            chosen[name] = value
    judging = checked(chosen, JudgingConfig, "dcpo judge")
    verifier, form = verifiers(judging, {})(judging.verifier)
    built_in = any(member.name in BUILT_IN for member in members(judging.verifier))
    attempts = []
    for where, row in read_json_lines(args.pairs):
        if not isinstance(row.get("prediction"), str) or "reference" not in row:
            raise UserError(f"{where}: expected an object with prediction (text) and reference")
        split = split_text(row["prediction"], CONFIDENCE_TAG)
        reasoning = split.reasoning.decode(errors="replace")
        answer = form.extract(reasoning)
        columns = {"answer": row["reference"], **row}
        truth = str(row["reference"])
        if built_in:
            truth = _add_question_columns(columns, where)
        if any(member.name == "forecast" for member in members(judging.verifier)):
            truth = outcome_of(row["reference"], where)
        attempts.append(Attempt(answer, truth, reasoning, columns))
    outcomes = verifier(attempts)
    unjudged = sum(outcome is None for outcome in outcomes)
    if args.json:
        for outcome in outcomes:
            if outcome is None:
                print(json.dumps({"correct": None, "category": "unjudged"}))
                continue
            values = {"correct": outcome.correct, "category": outcome.category}
            print(json.dumps({**values, **(outcome.logged or {})}))
    else:
        right = sum(outcome.correct for outcome in outcomes if outcome is not None)
        print(f"{len(outcomes)} predictions, {right} correct, {unjudged} unjudged")
    check_unjudged(unjudged, len(outcomes), judging.max_error_rate, args.pairs)
    return 0


def _add_question_columns(columns: dict[str, Any], where: str) -> str:
    """Return the reference of a pair as text ("" accepts no answer), and set the columns that the
    verifiers of questions read. Raises :class:`UserError` for a reference or for
    options that are not understood.
    """
    from megatron_dcpo.data.answer_keys import answer_of
    from megatron_dcpo.data.question_options import options_of

    found = answer_of(columns["reference"], where)
    truth = found.texts[0] if found.texts else ""
    columns["answer"] = found.column or truth
    options = options_of(columns.get("options"), where)
    if options is not None:
        columns["options"] = options.texts
    return truth


def _judge_programs(args: argparse.Namespace) -> int:
    """Print one line per program, in order, as soon as its verdict is known."""
    from megatron_dcpo.judging.answers import extract_program
    from megatron_dcpo.sandbox.program_judge import CodePool
    from megatron_dcpo.sandbox.tests import check_syntax, checked_tests

    limits = _program_limits(args)
    if args.program_seconds is None:
        limits = replace(limits, program_seconds=10 * limits.test_seconds)
    rows = _read_programs(args.programs)
    for where, _, tests in rows:
        check_syntax(checked_tests(tests, where), where)
    workers = args.workers if args.workers is not None else len(os.sched_getaffinity(0))
    counts: Counter[str] = Counter()
    with CodePool(limits=limits, sandbox=args.sandbox or "auto", workers=workers) as pool:
        print(f"sandbox: {pool.level}", file=sys.stderr)
        futures = []
        for where, response, tests in rows:
            program = extract_program(response)
            futures.append((where, pool.submit(program, tests, where)))
        for where, future in futures:
            verdict = future.result()
            counts[verdict.category] += 1
            if args.json:
                values = {"correct": verdict.correct, "category": verdict.category}
                print(json.dumps(values), flush=True)
            elif not verdict.correct:
                print(printable(f"  {where}: {verdict.category}: {verdict.detail}"))
    if not args.json:
        parts = [f"{count} {name}" for name, count in counts.most_common()]
        print(f"{len(rows)} programs: {', '.join(parts)}")
    return 0


def _read_programs(path: str) -> list[tuple[str, str, Any]]:
    """Return file and line of each program, for messages, its response and its tests."""
    from megatron_dcpo.data.row_files import read_json_lines

    rows = []
    for where, row in read_json_lines(path):
        if not isinstance(row.get("response"), str) or "tests" not in row:
            raise UserError(f"{where}: expected an object with response (text) and tests")
        rows.append((where, row["response"], row["tests"]))
    return rows


def _read_pairs(path: str) -> list[tuple[str, str]]:
    from megatron_dcpo.data.row_files import read_json_lines

    pairs = []
    for where, row in read_json_lines(path):
        try:
            pairs.append((_text(row["prediction"]), _reference(row["reference"], where)))
        except (KeyError, TypeError):
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise UserError(
                f"{where}: expected an object with prediction and reference, found {found}"
            ) from None
    return pairs


def _reference(value: object, where: str) -> str:
    """Return the reference of a pair as text; of a list or an object, its only text."""
    from megatron_dcpo.data.answer_keys import answer_of, is_structured

    if not is_structured(value):
        return _text(value)
    texts = answer_of(value, where).texts
    if len(texts) != 1:
        raise UserError(
            f"{where}: the reference has {len(texts)} texts; expected one, or --verifier exact"
        )
    return texts[0]


def _text(value: object) -> str:
    """Return a field as text: numbers as they are written, a missing answer as an empty text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return json.dumps(value)
    raise TypeError(f"neither text nor number: {value!r:.40}")


@dataclass(frozen=True)
class JudgedPair:
    """A pair with its verdict. ``answer`` was read in the prediction, and ``string_equal`` says
    whether it equals the reference apart from white space.
    """

    answer: str
    reference: str
    correct: bool
    string_equal: bool


def read_answer(prediction: str) -> str:
    """Return the last complete box before the confidence line. A prediction without any box is
    itself a bare answer.

    In training and evaluation a response without a box is wrong. Here pairs of bare answers are
    judged as well, so only a text with a box that is never closed has no answer.
    """
    from megatron_dcpo.judging.answers import extract_boxed

    before, _, _ = prediction.partition(CONFIDENCE_TAG)
    boxed = extract_boxed(before)
    if boxed is not None:
        return boxed.strip()
    if "\\boxed" in before:
        return ""
    return before.strip()


def judge_pairs(pairs: Sequence[tuple[str, str]]) -> list[JudgedPair]:
    """Judge (prediction, reference) pairs, in order."""
    from megatron_dcpo.judging.math.pool import equivalent_many

    answers = [read_answer(prediction) for prediction, _ in pairs]
    references = [reference.strip() for _, reference in pairs]
    verdicts = equivalent_many(list(zip(answers, references, strict=True)))
    judged = []
    for answer, reference, correct in zip(answers, references, verdicts, strict=True):
        string_equal = "".join(answer.split()) == "".join(reference.split())
        judged.append(JudgedPair(answer, reference, correct, string_equal))
    return judged


def report(judged: Sequence[JudgedPair]) -> dict[str, Any]:
    """Return counts, and the distinct pairs on which verifier and string equality disagree, the
    most frequent first.
    """
    differing: Counter[JudgedPair] = Counter()
    for pair in judged:
        if pair.correct != pair.string_equal:
            differing[pair] += 1
    disagreements = []
    for pair, count in differing.most_common():
        row = {
            "answer": pair.answer,
            "reference": pair.reference,
            "correct": pair.correct,
            "count": count,
        }
        disagreements.append(row)
    return {
        "pairs": len(judged),
        "correct": sum(pair.correct for pair in judged),
        "string_equal": sum(pair.string_equal for pair in judged),
        "disagreements": disagreements,
    }


def _program_limits(args: argparse.Namespace) -> CodeLimits:
    """Return the given limits, with the defaults of ``CodeLimits`` for the others. Raises
    :class:`UserError`.
    """
    from megatron_dcpo.sandbox.limits import CodeLimits

    flags_set = {}
    for name in ("test_seconds", "program_seconds", "memory_mb"):
        value = getattr(args, name, None)
        if value is not None:
            flags_set[name] = value
    return CodeLimits(**flags_set)
