"""``dcpo calibrate``: fit a post-hoc confidence on judged samples; ``dcpo evaluate --calibrator``
uses it.
"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, add_kinds_argument, positive_int, refuse_given
from megatron_dcpo.errors import UserError

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers

logger = logging.getLogger(__name__)

_EPOCHS = 200


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help=VERBS["calibrate"],
        description="Fit a predictor on the samples.jsonl of dcpo evaluate: a logistic regression "
        "on a response's log-probs and length, and on what it states (--features response) or the "
        "task (--features task); ConfClass; or temperature, Platt "
        "or isotonic scaling of one kind of confidence. Use training or validation problems, "
        "never those that are reported. A hash splits the problems into fitted and held-out ones, "
        "and the scores shown are of the held-out ones. ConfClass needs samples drawn with dcpo "
        "evaluate --repeats 20 --features.",
    )
    parser.add_argument(
        "--samples",
        nargs="+",
        metavar="FILE",
        required=True,
        help="samples.jsonl of an evaluation, a log of Inspect or lm-eval, or a table",
    )
    parser.add_argument(
        "--columns",
        metavar="OURS=THEIRS,...",
        help="columns of a table: correct=NAME, confidence=NAME; text, problem, group, task, kind; "
        "verl, trl, lighteval or verifiers: theirs",
    )
    parser.add_argument(
        "--kind",
        "--method",
        dest="kind",
        help="logistic (default), confclass, temperature, platt or isotonic",
    )
    parser.add_argument(
        "--source",
        help="input of a scaling: a kind of confidence (default token; platt and isotonic also "
        "take logprob, the reasoning's log-prob); of confclass: mean or full (default mean)",
    )
    parser.add_argument(
        "--features",
        choices=("response", "reasoning", "task", "turns"),
        help="inputs of logistic: log-probs, length and the stated confidence (response, default); "
        "without what is stated (reasoning); the same with the task, which a stated confidence has "
        "to beat (task); what agents stated at each turn, by its number (turns, the default for "
        "samples of rollout.asks_confidence=turns)",
    )
    parser.add_argument(
        "--task-column",
        metavar="NAME",
        help="features task: where the task stands: what --kinds may name (default kind)",
    )
    add_kinds_argument(parser)
    parser.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="file for the predictor (.npz)",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.2,
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
        default=0,
        metavar="N",
        help="of the choice of held-out problems, and of a fit that begins at random (default 0)",
    )
    parser.add_argument("--json", action="store_true", help="print the held-out scores as JSON")
    parser.set_defaults(run=run)


def _source(args: argparse.Namespace) -> str | None:
    """Return what the predictor reads, by ``--source``, or ``--features`` and ``--task-column``.
    Raises :class:`UserError` for options that do not go together.
    """
    reads_task = args.features == "task"
    if args.task_column and not reads_task:
        raise UserError("--task-column goes with --features task")
    if args.features and args.kind != "logistic":
        raise UserError(f"--features goes with --kind logistic; --kind {args.kind} reads --source")
    if args.features and args.source and args.source != args.features:
        raise UserError(f"--features {args.features} and --source {args.source} differ")
    if reads_task and args.task_column:
        return f"{args.features}:{args.task_column}"
    return str(args.features) if args.features else args.source


def run(args: argparse.Namespace) -> int:
    args.kind = args.kind or "logistic"
    if args.kind != "confclass":
        refuse_given(args, ["epochs"], "goes with --kind confclass, and is the most of its passes")
    from megatron_dcpo.cli.tables import show_scores
    from megatron_dcpo.evaluation.fitting import PosthocFit, fit_on_files
    from megatron_dcpo.evaluation.foreign import parse_columns

    options = PosthocFit(
        method=args.kind,
        source=_source(args),
        held_out=args.held_out,
        seed=args.seed,
        epochs=args.epochs or _EPOCHS,
        kinds_by=args.kinds or args.task_column or "",
        columns=parse_columns(args.columns) if args.columns else None,
    )
    scores = fit_on_files(args.samples, args.out, options)
    show_scores("predictor", args.out, scores.rows, scores.kinds, as_json=args.json)
    return 0
