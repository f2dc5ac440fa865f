"""``python -m lab VERB``: run the lab.

The results are in `docs/lab/README.md`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lab import (
    adapter,
    confidences,
    distilled,
    equal_data,
    language_model,
    price,
    testgrid,
    testtables,
    world2,
)
from lab.note import tables as note_tables
from lab.theory.run import write_theory
from megatron_dcpo.calibration import json_ready
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.runs import find_runs


def main() -> int:
    """Run one verb; return the exit status."""
    args = _parser().parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    try:
        args.run(args)
    except UserError as error:
        print(f"lab: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    test = verbs.add_parser(
        "test", help="train the cells of the test and sample them; finished cells are kept"
    )
    test.add_argument(
        "--methods", default=",".join(testgrid.METHODS_OF_THE_TEST), help="default: %(default)s"
    )
    tables = verbs.add_parser(
        "test-tables", help="the tables of the test, from the published responses"
    )
    tables.add_argument(
        "--grid", type=Path, help="the --grid of a test whose cells to publish first"
    )
    for verb in (test, tables):
        verb.add_argument(
            "--final", action="store_true", help="the last test: every method in every draw"
        )
    second = verbs.add_parser(
        "world2", help="the second world: its tables from the published responses"
    )
    of_price = verbs.add_parser(
        "price",
        help="the price in accuracy at equal informative groups: its tables from the published "
        "responses",
    )
    of_price.add_argument(
        "--replication",
        action="store_true",
        help="of ten fresh pretrainings (docs/lab/price_replicated.md)",
    )
    own = verbs.add_parser(
        "adapter", help="a confidence with parameters of its own against the bar: its tables"
    )
    language = verbs.add_parser(
        "language-model", help="what policies of SmolLM2-135M state of what they know: its tables"
    )
    note = verbs.add_parser(
        "note", help="the note after the answer: its tables from the published numbers"
    )
    note.add_argument(
        "--train",
        action="store_true",
        help="first run the stages of every pretraining; finished ones are kept",
    )
    note.add_argument(
        "--settle",
        action="store_true",
        help="try the learning rates on the pretraining that is in no table, and nothing else",
    )
    of_teacher = verbs.add_parser(
        "distilled", help="what becomes of a confidence when a policy is distilled: its tables"
    )
    of_teacher.add_argument("--jobs", type=int, default=1, help="processes at a time")
    for verb in (second, of_price, of_teacher):
        verb.add_argument(
            "--train",
            action="store_true",
            help="first train, sample and publish; finished cells are kept",
        )
    theory = verbs.add_parser(
        "theory", help="the exact small cases and the drift of the second world's run"
    )
    gradients = verbs.add_parser(
        "probe", help="accuracy's and calibration's gradients on one policy; nothing is trained"
    )
    gradients.add_argument("--config", required=True, help="of a training, whose model.path is it")
    gradients.add_argument(
        "--batches", type=int, default=8, help="batches to sample (default: %(default)s)"
    )
    gradients.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    gradients.add_argument("--out", type=Path, help="of probe.json, probe.png (default: run_dir)")
    gradients.set_defaults(run=_probe)
    equal = verbs.add_parser(
        "equal-data", help="trainings after as many informative groups, or responses, each"
    )
    equal.add_argument("runs", nargs="+", metavar="RUN", help="directories with metrics.jsonl")
    equal.set_defaults(run=_equal_data)
    of_test = ",".join(f"large.{n}" for n in range(1, 6))
    for verb, cells, policies in (
        (test, "runs/lab_test", of_test),
        (second, "runs/world2", "graphs.1"),
        (of_price, "runs/price", None),
    ):
        verb.add_argument(
            "--policies",
            default=policies,
            help="pretrainings, separated by commas (default: those of the study)",
        )
        verb.add_argument(
            "--seeds", type=int, default=1, help="of every method on every pretraining"
        )
        verb.add_argument("--jobs", type=int, default=2, help="processes at a time, one core each")
        _add_grid(verb, cells)
    _add_grid(note, "runs/note")
    _add_grid(of_teacher, "runs/distilled")
    for verb, run in (
        (test, _test),
        (tables, _tables),
        (second, _world2),
        (of_price, _price),
        (own, _adapter),
        (language, _language_model),
        (note, _note),
        (of_teacher, _distilled),
        (theory, lambda a: write_theory(a.out)),
    ):
        verb.set_defaults(run=run)
        if verb is not test:
            verb.add_argument(
                "--out",
                type=Path,
                default=Path("docs/lab"),
                help="where they go (default: %(default)s)",
            )
    return parser


def _add_grid(verb: argparse.ArgumentParser, cells: str) -> None:
    verb.add_argument(
        "--grid",
        type=Path,
        default=Path(cells),
        help="where the cells are (default: %(default)s)",
    )


def _probe(args: argparse.Namespace) -> None:
    from lab import probe  # it imports torch and Megatron

    probe.main(args.config, args.overrides, args.batches, args.out)


def _equal_data(args: argparse.Namespace) -> None:
    comparisons = equal_data.at_equal_data(find_runs(args.runs))
    values = [asdict(comparison) for comparison in comparisons]
    print(json.dumps(json_ready(values), indent=1))


def _test(args: argparse.Namespace) -> None:
    chosen = testgrid.cells(
        args.policies.split(","), args.methods.split(","), range(1, args.seeds + 1)
    )
    lab = testgrid.Lab(args.grid.resolve(), args.jobs)
    (replace(lab, draws=testgrid.FINAL, all_methods=True) if args.final else lab).run(chosen)


def _tables(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    test = "final" if args.final else "test"
    if args.grid:
        logging.info(
            "%d cells packed", testgrid.pack(args.grid, args.out / f"{test}_records.tar.xz")
        )
    found = testtables.tables(args.out, test)
    print(f"best on the validation problems: {found['best']}")


def _world2(args: argparse.Namespace) -> None:
    records = args.out / world2.RECORDS
    if args.train:
        _train(args, world2.world(args.grid, args.jobs), world2.METHODS, records)
    world2.tables(records, args.out)


def _price(args: argparse.Namespace) -> None:
    study = price.REPLICATION if args.replication else price.FIRST
    if args.policies is None:
        args.policies = ",".join(f"large.{number}" for number in study.pretrainings)
    records = args.out / study.records
    if args.train:
        _train(args, price.lab(args.grid, args.jobs), study.rows, records)
    price.tables(records, args.out, study)


def _adapter(args: argparse.Namespace) -> None:
    for study in (adapter.FIRST, adapter.AGAIN):
        confidences.tables(args.out / study.records, args.out, study)


def _language_model(args: argparse.Namespace) -> None:
    study = language_model.STUDY
    confidences.tables(args.out / study.records, args.out, study)


def _note(args: argparse.Namespace) -> None:
    records = args.out / note_tables.RECORDS
    if args.settle or args.train:
        from lab.note.cells import PRETRAININGS, Study  # it imports torch

        study = Study(args.grid)
        if args.settle:
            print(json.dumps(study.settle(), indent=1))
            return
        study.run(PRETRAININGS)
        logging.info("%d pretrainings packed", study.pack(records))
    note_tables.tables(records, args.out)


def _distilled(args: argparse.Namespace) -> None:
    records = args.out / distilled.RECORDS
    if args.train:
        distilled.train(args.grid, args.jobs)
        logging.info("%d cells packed", testgrid.pack(args.grid, records))
    distilled.tables(records, args.out)


def _train(
    args: argparse.Namespace, lab: testgrid.Lab, methods: Sequence[str], records: Path
) -> None:
    """Train and sample the cells that are not finished, and pack all of them into ``records``."""
    policies = args.policies.split(",")
    lab.run(testgrid.cells(policies, methods, range(1, args.seeds + 1)))
    logging.info("%d cells packed", testgrid.pack(args.grid, records))


if __name__ == "__main__":
    sys.exit(main())
