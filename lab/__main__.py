"""``python -m lab test|test-tables|world2|real-model|controls|theory``: run the lab."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from lab import testgrid, world2
from megatron_dcpo.errors import UserError

DOCS = Path("docs/lab")


def main() -> int:
    """Run one verb; return the exit status."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        args.run(args)
    except UserError as error:
        print(f"lab: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    verbs = parser.add_subparsers(required=True)
    test = verbs.add_parser("test", help="train the cells of the test and sample them; finished cells are kept")
    test.add_argument("--policies", default="large.1,large.2,large.3,large.4,large.5", help="default: %(default)s")
    test.add_argument("--methods", default=",".join(testgrid.METHODS_OF_THE_TEST), help="default: %(default)s")
    test.add_argument("--smoke", action="store_true", help="three steps, a few problems")
    second = verbs.add_parser("world2", help="the second world: its tables from the published responses")
    second.add_argument(
        "--train", action="store_true", help="train and sample first, and publish; finished cells are kept"
    )
    second.add_argument("--policies", default="graphs.1", help="pretrainings (default: %(default)s)")
    for verb, cells in ((test, "runs/lab_test"), (second, "runs/world2")):
        verb.add_argument("--seeds", type=int, default=1, help="of every method on every pretraining")
        verb.add_argument("--jobs", type=int, default=2, help="processes at a time, one core each")
        verb.add_argument("--grid", type=Path, default=Path(cells), help="where the cells are (default: %(default)s)")
    tables = verbs.add_parser("test-tables", help="tables and figure of the test, from the published responses")
    tables.add_argument("--grid", type=Path, help="the --grid of a test whose cells to publish first")
    real = verbs.add_parser("real-model", help="tables of the real model, from the published samples")
    real.add_argument("--runs", type=Path, help="the evaluated runs to publish first, for instance runs/smollm2")
    controls = verbs.add_parser("controls", help="probes and P(true) of the real model's policies, which must be there")
    controls.add_argument("--runs", type=Path, required=True, help="as for real-model")
    controls.add_argument("--methods", default="grpo,dcpo", help="default: %(default)s")
    theory = verbs.add_parser("theory", help="the exact small cases")
    theory.add_argument("--smoke", action="store_true", help="short simulations")
    runs = (test, _test), (tables, _tables), (second, _world2), (real, _real), (controls, _controls), (theory, _theory)
    for verb, run in runs:
        verb.set_defaults(run=run)
        if verb not in (test, controls):
            verb.add_argument(
                "--out", type=Path, default=DOCS, help="where tables and figures go (default: %(default)s)"
            )
    return parser


def _test(args: argparse.Namespace) -> None:
    chosen = testgrid.cells(args.policies.split(","), args.methods.split(","), range(1, args.seeds + 1))
    grid = testgrid.Lab(args.grid.resolve(), args.jobs)
    if args.smoke:
        overrides = ("data.prompts_per_step=8", "training.micro_batch_size=64")
        grid = testgrid.Lab(args.grid.resolve(), args.jobs, steps=3, problems=16, overrides=overrides)
    grid.run(chosen)


def _tables(args: argparse.Namespace) -> None:
    from lab import testfigures, testtables

    args.out.mkdir(parents=True, exist_ok=True)
    if args.grid:
        logging.info("%d cells packed", testgrid.pack(args.grid, args.out / testtables.RECORDS))
    found = testtables.tables(args.out / testtables.RECORDS, args.out)
    testfigures.draw_curves(args.out / testtables.RECORDS, args.out / "test_curves.png")
    print(f"best on the validation problems: {found['best']}")


def _world2(args: argparse.Namespace) -> None:
    if args.train:
        cells = testgrid.cells(args.policies.split(","), world2.METHODS, range(1, args.seeds + 1))
        world2.world(args.grid, args.jobs).run(cells)
        logging.info("%d cells packed", testgrid.pack(args.grid, args.out / world2.RECORDS))
    world2.tables(args.out / world2.RECORDS, args.out)


def _real(args: argparse.Namespace) -> None:
    from lab import real_model

    if args.runs:
        logging.info("%d files packed", real_model.pack(args.runs, args.out / real_model.RECORDS))
    with tempfile.TemporaryDirectory() as scratch:
        print(real_model.tables(args.out / real_model.RECORDS, args.out, Path(scratch)))


def _controls(args: argparse.Namespace) -> None:
    from lab.controls import write_controls
    from lab.real_model import PARTS

    for method in args.methods.split(","):
        write_controls(args.runs, method, tuple(PARTS))


def _theory(args: argparse.Namespace) -> None:
    from lab.theory.run import write_theory

    write_theory(args.out, *((1, 100) if args.smoke else ()))


if __name__ == "__main__":
    sys.exit(main())
