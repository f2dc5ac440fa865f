"""``dcpo calibrate``: fit a post-hoc confidence on judged samples; ``dcpo evaluate --calibrator``
uses it. With ``--kind adapter`` it is a low-rank adapter (``cli/calibrate_adapter.py``).
"""

from __future__ import annotations

import argparse
import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, positive_int
from megatron_dcpo.errors import UserError

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers

logger = logging.getLogger(__name__)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help=VERBS["calibrate"],
        description="Fit a predictor on the samples.jsonl of dcpo evaluate: a logistic regression "
        "on a response's log-probs and length, and on what it states (--features response) or the "
        "task (--features task); ConfClass; temperature, Platt "
        "or isotonic scaling of one kind of confidence; or a low-rank adapter of a model, which "
        "states the confidence (--kind adapter --model DIR). Use training or validation problems, "
        "never those that are reported. A hash splits the problems into fitted and held-out ones, "
        "and the scores shown are of the held-out ones. ConfClass needs samples drawn with dcpo "
        "evaluate --repeats 20 --features.",
    )
    parser.add_argument(
        "--samples", nargs="+", metavar="FILE", required=True, help="samples.jsonl of an evaluation"
    )
    parser.add_argument(
        "--kind",
        "--method",
        dest="method",
        default="logistic",
        help="logistic (default), confclass, temperature, platt, isotonic or adapter",
    )
    parser.add_argument(
        "--source",
        help="input of a scaling: a kind of confidence (default token; platt and isotonic also "
        "take logprob, the reasoning's log-prob); of confclass: mean or full (default mean)",
    )
    parser.add_argument(
        "--features",
        choices=("response", "reasoning", "task"),
        help="inputs of logistic: log-probs, length and the stated confidence (response, default); "
        "without what is stated (reasoning); the same with the task, which a stated confidence has "
        "to beat (task)",
    )
    parser.add_argument(
        "--task-column",
        metavar="NAME",
        help="features task: where the task stands: kind (default), task (the benchmark), or a "
        "column that the samples keep in row",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="file for the predictor (.npz); of an adapter the run directory, or with --apply the "
        "samples with its confidence (.jsonl)",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        help="share of the problems to hold out (default 0.2; 0: fit on all)",
    )
    parser.add_argument(
        "--epochs",
        type=positive_int,
        default=200,
        help="confclass: maximum number of passes over the samples (default 200)",
    )
    parser.add_argument("--seed", type=int, default=0)
    of_adapter = parser.add_argument_group("adapter")
    of_adapter.add_argument(
        "--model",
        metavar="DIR",
        help="Hugging Face checkpoint that the adapter is added to: the policy of the samples, or "
        "another model",
    )
    of_adapter.add_argument(
        "--teacher",
        choices=("correct", "logistic"),
        help="what the confidence learns: whether the answer is right (correct, default), or what "
        "a logistic regression fitted on other problems says (logistic)",
    )
    of_adapter.add_argument(
        "--decimals",
        type=int,
        choices=(1, 2),
        help="decimals of the stated confidence: 2 (default), or 1, which takes two sequences an "
        "answer instead of eleven where every digit is a token",
    )
    of_adapter.add_argument(
        "--apply",
        metavar="RUN",
        help="fit nothing: write --samples with the confidence of the adapter in RUN to --out",
    )
    of_adapter.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="options of dcpo sft for the training of the adapter, as optimizer.lr=1e-4",
    )
    parser.add_argument("--json", action="store_true", help="print the held-out scores as JSON")
    parser.set_defaults(run=run)


# sources that are no kind of confidence
_INPUTS = ("mean", "full", "response", "reasoning", "task")


def _source(args: argparse.Namespace) -> str | None:
    """Return what the predictor reads, by ``--source``, or ``--features`` and ``--task-column``.
    Raises :class:`UserError` for options that do not go together.
    """
    if args.task_column and args.features != "task":
        raise UserError("--task-column goes with --features task")
    if args.features and args.method != "logistic":
        raise UserError(
            f"--features goes with --kind logistic; --kind {args.method} reads --source"
        )
    if args.features and args.source and args.source != args.features:
        raise UserError(f"--features {args.features} and --source {args.source} differ")
    if args.features == "task" and args.task_column:
        return f"task:{args.task_column}"
    return str(args.features) if args.features else args.source


def _refuse_options_of_adapter(args: argparse.Namespace) -> None:
    """Raise :class:`UserError` for an option that only ``--kind adapter`` reads."""
    for name in ("model", "teacher", "decimals"):
        if getattr(args, name):
            raise UserError(f"--{name} goes with --kind adapter")
    if args.overrides:
        raise UserError(f"{args.overrides[0]} goes with --kind adapter")


# section.key=value
_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)+=")


def _separate_overrides(args: argparse.Namespace) -> None:
    """Move options that follow the files of ``--samples`` to the overrides: argparse takes every
    word up to the next flag for a file.
    """
    words = args.samples
    args.samples = [word for word in words if not _OVERRIDE.match(word)]
    args.overrides = [word for word in words if _OVERRIDE.match(word)] + args.overrides
    if not args.samples:
        raise UserError("--samples names no file; name one before the options")


def run(args: argparse.Namespace) -> int:
    _separate_overrides(args)
    if args.method == "adapter" or args.apply:
        from megatron_dcpo.cli import calibrate_adapter

        return calibrate_adapter.run(args)
    _refuse_options_of_adapter(args)
    from megatron_dcpo.cli.report import show_scores
    from megatron_dcpo.evaluation import posthoc
    from megatron_dcpo.evaluation.fit_record import finish_reasons_of, fitted_on_of, record_of
    from megatron_dcpo.evaluation.foreign import read_any
    from megatron_dcpo.evaluation.scoring import RANKING_ONLY, parse_kinds

    source = _source(args)
    if source and source.partition(":")[0] not in _INPUTS:
        parse_kinds(source)
    samples = []
    for path in args.samples:
        samples += read_any(path)
    predictor, held_out = posthoc.fit(
        args.method, samples, source, held_out=args.held_out, seed=args.seed, epochs=args.epochs
    )
    fitted_on = fitted_on_of(args.samples, samples)
    if fitted_on is None:
        logger.warning(
            "there is no settings.json next to the samples, so the predictor does not say what it "
            "was fitted on, and dcpo serve takes it only with --accept-mismatch"
        )
    confidences = predictor.predict(held_out or samples)
    record = record_of(fitted_on, held_out, confidences)
    record = replace(record, finish_reasons=finish_reasons_of(samples))
    replace(predictor, record=record).save(args.out)
    rows = {}
    if held_out:
        before = predictor.source
        if before.partition(":")[0] in (*_INPUTS, *RANKING_ONLY):
            before = "token"
        rows = {before: posthoc.scores(held_out, before), args.method: posthoc.scores(held_out)}
    show_scores("predictor", args.out, rows, as_json=args.json)
    return 0
