"""``dcpo report RUN...``: one self-contained HTML page that compares runs, and a table on the
terminal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, add_kinds_argument, refuse_given
from megatron_dcpo.cli.tables import print_table
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.evaluation.alike import AlikeRuns
    from megatron_dcpo.evaluation.runs import EvaluatedRun


_TITLE = "Accuracy and calibration"
_PORT = 8765
# options of the page that is written
_OF_A_PAGE = ("columns", "out", "title", "kinds", "json")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help=VERBS["report"],
        description="Compare runs: accuracy and calibration, reliability diagrams, training "
        "curves, sample responses. A RUN is a directory with evaluation.json and/or "
        "metrics.jsonl, or one that contains such directories.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="run directory, or a file: samples of ours, another tool's log (docs/elsewhere.md), "
        "or a table",
    )
    parser.add_argument(
        "--columns",
        metavar="OURS=THEIRS,...",
        help="columns of a table: correct=NAME, confidence=NAME; text, problem, group, task, kind; "
        "verl, trl, lighteval or verifiers: theirs; of a log of lm-eval filter=NAME, of Inspect "
        "correct=SCORER",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="file of the page (default: report.html in the first RUN)"
    )
    parser.add_argument("--title", help="heading of the page (default: Accuracy and calibration)")
    add_kinds_argument(parser)
    parser.add_argument(
        "--json", action="store_true", help="print the comparison as JSON instead of a table"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="follow one RUN in a browser on this machine while it trains",
    )
    parser.add_argument("--port", type=int, help="port of --serve (default 8765; 0: any free port)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.calibration.summary import json_ready

    # imports matplotlib, which is slow and which other verbs do not need
    from megatron_dcpo.evaluation import report
    from megatron_dcpo.evaluation.alike import evaluated_alike
    from megatron_dcpo.evaluation.foreign import parse_columns
    from megatron_dcpo.evaluation.runs import find_runs, with_kinds

    if args.serve:
        refuse_given(args, _OF_A_PAGE, "does not go with --serve, which writes no page")
        return serve(args.runs, _PORT if args.port is None else args.port)
    refuse_given(args, ["port"], "goes with --serve")
    columns = parse_columns(args.columns) if args.columns else None
    runs = find_runs(args.runs, columns)
    if args.kinds:
        runs = [with_kinds(run, args.kinds) for run in runs]
    first = Path(args.runs[0])
    target = args.out or first / "report.html"
    if first.is_file() and not args.out:
        target = first.with_name(f"{first.stem}.report.html")
    try:
        page = report.write_report(runs, target, args.title or _TITLE)
        numbers = report.comparison(runs)
        groups = evaluated_alike(runs)
        if not args.json:
            print_table(numbers)
            _print_not_alike(groups)
            _print_unevaluated(runs)
            _print_without_kinds(runs)
    except report.OTHER_FORM as error:
        raise UserError(
            f"a file of {', '.join(args.runs)} has another form than dcpo evaluate and dcpo train "
            f"write ({type(error).__name__}: {one_line(error, 200)}); --debug shows the place"
        ) from error
    if args.json:
        values: dict[str, Any] = {"report": str(page), "runs": numbers}
        values["alike"] = [_group_as_json(group) for group in groups]
        values["not_evaluated"] = [one.name for one in runs if one.evaluation is None]
        print(json.dumps(json_ready(values), indent=1))
    else:
        print(printable(f"wrote {page}"))
    return 0


def serve(runs: Sequence[str], port: int) -> int:
    """Serve the page until it is interrupted."""
    from megatron_dcpo.evaluation.live import ADDRESS, live_server

    if len(runs) > 1:
        raise UserError(
            f"--serve shows one run, not {len(runs)}; start one server per run, each with a "
            "different --port"
        )
    with live_server(runs[0], port) as server:
        url = f"http://{ADDRESS}:{server.server_port}/"
        print(printable(f"{url} shows {runs[0]}; Ctrl-C ends it"), flush=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _print_not_alike(groups: Sequence[AlikeRuns]) -> None:
    """Say which runs were not evaluated alike, and which did not answer the same problems."""
    if len(groups) > 1:
        print("not evaluated alike:")
        for group in groups:
            names = ", ".join(run.name for run in group.runs)
            print(printable(f"  {names}: {group.title}"))
    for group in groups:
        for line in group.other_problems:
            print(printable(line))


def _group_as_json(group: AlikeRuns) -> dict[str, Any]:
    return {
        "runs": [run.name for run in group.runs],
        "benchmarks": group.benchmarks,
        "sampling": group.sampling,
        "other_problems": group.other_problems,
    }


def _print_unevaluated(runs: Sequence[EvaluatedRun]) -> None:
    """Say of each run without an evaluation what its row is, and how to evaluate it."""
    from megatron_dcpo.evaluation.runs import unevaluated

    for run in runs:
        if run.evaluation is None:
            print(printable(f"{run.name}: {unevaluated(run.path)}"))


def _print_without_kinds(runs: Sequence[EvaluatedRun]) -> None:
    """Say of each evaluation without kinds of problem which could be named."""
    from megatron_dcpo.data.problem_kinds import no_kinds_line

    for run in runs:
        kinds = (run.evaluation or {}).get("kinds")
        if kinds and not kinds["by"]:
            print(printable(f"{run.name}: {no_kinds_line(kinds['possible'])}"))
