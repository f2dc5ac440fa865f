"""``dcpo calibrate``: fit a post-hoc confidence on judged samples; ``dcpo evaluate --calibrator``
uses it. With ``--kind adapter`` it is a low-rank adapter (``cli/calibrate_adapter.py``).
"""

from __future__ import annotations

import argparse
import logging
import re
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, add_kinds_argument, positive_int, refuse_given
from megatron_dcpo.errors import UserError

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers

logger = logging.getLogger(__name__)

_HELD_OUT = 0.2
_EPOCHS = 200
_OF_A_FIT = ("held_out", "seed", "teacher", "decimals", "target", "kinds", "resume")


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
        dest="kind",
        help="logistic (default), confclass, temperature, platt, isotonic or adapter",
    )
    parser.add_argument(
        "--source",
        help="input of a scaling: a kind of confidence (default token; platt and isotonic also "
        "take logprob, the reasoning's log-prob); of confclass: mean or full (default mean)",
    )
    parser.add_argument(
        "--features",
        choices=("response", "reasoning", "task", "states", "stack"),
        help="inputs of logistic: log-probs, length and the stated confidence (response, default); "
        "without what is stated (reasoning); the same with the task, which a stated confidence has "
        "to beat (task); the model's state before the number, a linear probe (states); task and "
        "probe (stack). The last two need dcpo evaluate --keep states",
    )
    parser.add_argument(
        "--task-column",
        metavar="NAME",
        help="features task and stack: where the task stands: what --kinds may name (default kind)",
    )
    add_kinds_argument(parser)
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
        metavar="SHARE",
        help="share of the problems to hold out (default 0.2; 0: fit on all)",
    )
    parser.add_argument(
        "--epochs",
        type=positive_int,
        metavar="N",
        help="confclass: maximum number of passes over the samples (default 200)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of the choice of held-out problems, and of a fit that begins at random (default 0)",
    )
    of_adapter = parser.add_argument_group("adapter")
    of_adapter.add_argument(
        "--model",
        metavar="DIR",
        help="Hugging Face checkpoint that the adapter is added to, or its name on the hub: the "
        "policy of the samples, or another model",
    )
    of_adapter.add_argument(
        "--teacher",
        choices=("correct", "reasoning", "task", "states", "stack"),
        help="what the confidence learns: whether the answer is right (correct, default), or what "
        "a logistic regression with these --features says that was fitted on other problems",
    )
    of_adapter.add_argument(
        "--decimals",
        type=int,
        choices=(1, 2),
        help="decimals of the stated confidence: 2 (default), or 1, which takes two sequences an "
        "answer instead of eleven where every digit is a token",
    )
    of_adapter.add_argument(
        "--target",
        choices=("brier", "text"),
        help="what is trained: the expected Brier score over all numbers (brier, default), or the "
        "number nearest to what is learned, as text, which takes one sequence an answer (text)",
    )
    of_adapter.add_argument(
        "--apply",
        metavar="RUN",
        help="fit nothing: write --samples with the confidence of the adapter in RUN to --out",
    )
    of_adapter.add_argument(
        "--read",
        choices=("mean", "greedy"),
        help="with --apply: the mean of the numbers by their probabilities (default), or the most "
        "probable number",
    )
    of_adapter.add_argument(
        "--demonstrations",
        metavar="FILE",
        help="with --apply: also write the answers again, each with its confidence in place of the "
        "number that it states, for dcpo sft",
    )
    of_adapter.add_argument(
        "--resume",
        choices=("none", "auto"),
        help="auto goes on with the adapter that a stopped fit has begun in --out",
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


def _source(args: argparse.Namespace) -> str | None:
    """Return what the predictor reads, by ``--source``, or ``--features`` and ``--task-column``.
    Raises :class:`UserError` for options that do not go together.
    """
    reads_task = args.features in ("task", "stack")
    if args.task_column and not reads_task:
        raise UserError("--task-column goes with --features task and stack")
    if args.features and args.kind != "logistic":
        raise UserError(f"--features goes with --kind logistic; --kind {args.kind} reads --source")
    if args.features and args.source and args.source != args.features:
        raise UserError(f"--features {args.features} and --source {args.source} differ")
    if reads_task and args.task_column:
        return f"{args.features}:{args.task_column}"
    return str(args.features) if args.features else args.source


def _refuse_options_of_adapter(args: argparse.Namespace) -> None:
    """Raise :class:`UserError` for an option that only ``--kind adapter`` reads."""
    names = ("model", "teacher", "decimals", "target", "read", "demonstrations", "resume")
    refuse_given(args, names, "goes with --kind adapter")
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
    if args.apply:
        kind = () if args.kind == "adapter" else ("kind",)
        refuse_given(args, (*kind, *_OF_A_FIT), "does not go with --apply, which fits nothing")
    args.kind = args.kind or "logistic"
    args.held_out = _HELD_OUT if args.held_out is None else args.held_out
    args.seed = args.seed or 0
    if args.kind == "adapter" or args.apply:
        from megatron_dcpo.cli import calibrate_adapter

        return calibrate_adapter.run(args)
    _refuse_options_of_adapter(args)
    if args.kind != "confclass":
        refuse_given(args, ["epochs"], "goes with --kind confclass, and is the most of its passes")
    from megatron_dcpo.cli.report import show_scores
    from megatron_dcpo.evaluation.fitting import PosthocFit, fit_on_files

    options = PosthocFit(
        method=args.kind,
        source=_source(args),
        held_out=args.held_out,
        seed=args.seed,
        epochs=args.epochs or _EPOCHS,
        kinds_by=args.kinds or args.task_column or "",
    )
    scores = fit_on_files(args.samples, args.out, options)
    show_scores("predictor", args.out, scores.rows, scores.kinds, as_json=args.json)
    return 0
