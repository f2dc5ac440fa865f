"""``dcpo calibrate``: fit a post-hoc confidence on judged samples; ``dcpo evaluate --calibrator``
uses it.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, positive_int

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help=VERBS["calibrate"],
        description="Fit a logistic regression on a response's log-probs, length and stated "
        "confidence, ConfClass, "
        "or temperature, Platt or isotonic scaling of one kind of confidence, on the "
        "samples.jsonl of dcpo evaluate (of "
        "training or validation problems, never of those that are reported). Problems are split, "
        "by a hash, into fitted and "
        "held-out ones; the scores shown "
        "are of the held-out ones. ConfClass needs samples drawn with: dcpo evaluate --repeats 20 "
        "--features.",
    )
    parser.add_argument(
        "--samples",
        nargs="+",
        metavar="FILE",
        required=True,
        help="samples.jsonl of an evaluation",
    )
    parser.add_argument(
        "--kind",
        "--method",
        dest="method",
        default="logistic",
        help="logistic (default), confclass, temperature, platt or isotonic",
    )
    parser.add_argument(
        "--source",
        help="what a scaling reads: a kind of confidence (default token; logprob: the reasoning's "
        "log-prob, with platt or "
        "isotonic); confclass: mean or full (default mean)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        required=True,
        help="where to save the predictor (.npz)",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.2,
        help="share of the problems held out (default 0.2; 0: fit on all)",
    )
    parser.add_argument(
        "--epochs",
        type=positive_int,
        default=200,
        help="confclass: most passes over the samples",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--json", action="store_true", help="print the held-out scores as JSON"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.calibration.summary import json_ready
    from megatron_dcpo.cli.report import print_table
    from megatron_dcpo.evaluation import posthoc
    from megatron_dcpo.evaluation.samples import read_samples
    from megatron_dcpo.evaluation.scoring import RANKING_ONLY, parse_kinds

    if args.source and args.source not in ("mean", "full", "response"):
        parse_kinds(args.source)
    samples = [sample for path in args.samples for sample in read_samples(path)]
    predictor, held_out = posthoc.fit(
        args.method,
        samples,
        args.source,
        held_out=args.held_out,
        seed=args.seed,
        epochs=args.epochs,
    )
    predictor.save(args.out)
    if not held_out:
        print(
            json.dumps({"predictor": args.out})
            if args.json
            else f"fitted on all problems; wrote {args.out}"
        )
        return 0
    before = (
        "token"
        if predictor.source in ("mean", "full", "response", *RANKING_ONLY)
        else predictor.source
    )
    rows = {
        before: posthoc.scores(held_out, before),
        args.method: posthoc.scores(held_out),
    }
    if args.json:
        print(
            json.dumps(json_ready({"predictor": args.out, "held_out": rows}), indent=1)
        )
    else:
        print_table(rows, "held out")
        print(f"wrote {args.out}")
    return 0
