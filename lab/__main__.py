"""``python -m lab run|render|test|test-tables|world2|theory``: the lab. ``make lab`` and ``make lab-smoke`` call it."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from lab.grid import FAMILIES, grid, known, select
from lab.runner import FULL, SMOKE, Lab, has_policy
from lab.testgrid import METHODS_OF_THE_TEST, HeldOutLab, cells, pack
from megatron_dcpo.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="train and evaluate the grid; finished cells are kept")
    run.add_argument("--out", type=Path, default=Path("runs/lab"))
    run.add_argument("--jobs", type=int, default=2, help="processes at a time, one core each")
    run.add_argument("--seeds", type=int, default=5, help="of every method")
    run.add_argument("--families", help=f"of {', '.join(FAMILIES)} (default: those whose starting policy is there)")
    run.add_argument("--methods", help="only these (and what they start from), comma separated")
    run.add_argument("--smoke", action="store_true", help="three steps of everything, one seed")
    test = verbs.add_parser("test", help="train the grid of the test and sample it; finished cells are kept")
    test.add_argument("--out", type=Path, default=Path("runs/lab_test"))
    test.add_argument("--jobs", type=int, default=2, help="processes at a time, one core each")
    test.add_argument(
        "--policies", default="large.1,large.2,large.3,large.4,large.5", help="pretrainings (default: %(default)s)"
    )
    test.add_argument("--methods", default=",".join(METHODS_OF_THE_TEST), help="default: %(default)s")
    test.add_argument("--seeds", type=int, default=1, help="of every method on every pretraining")
    test.add_argument("--smoke", action="store_true", help="three steps, a few problems")
    tables = verbs.add_parser("test-tables", help="tables and figure of the test, from the published responses")
    tables.add_argument("--grid", type=Path, help="the --out of a test whose cells to publish first")
    tables.add_argument("--out", type=Path, default=Path("docs/lab"))
    second = verbs.add_parser("world2", help="the second world: its tables from the published responses")
    second.add_argument("--train", action="store_true", help="train and sample first; finished cells are kept")
    second.add_argument(
        "--grid", type=Path, default=Path("runs/world2"), help="the cells; published where there are any"
    )
    second.add_argument("--policies", default="graphs.1", help="pretrainings (make_policies.sh; default: %(default)s)")
    second.add_argument("--seeds", type=int, default=1)
    second.add_argument("--jobs", type=int, default=2, help="processes at a time, one core each")
    second.add_argument("--out", type=Path, default=Path("docs/lab"))
    render = verbs.add_parser("render", help="tables and figures from finished cells")
    render.add_argument("--grid", type=Path, help="the --out of a run whose cells to publish (default: as published)")
    render.add_argument("--out", type=Path, default=Path("docs/lab"))
    theory = verbs.add_parser("theory", help="the exact small cases")
    theory.add_argument("--out", type=Path, default=Path("docs/lab"))
    theory.add_argument("--smoke", action="store_true", help="short simulations")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    try:
        if args.verb == "run":
            run_grid(args)
        elif args.verb == "test":
            known(args.methods.split(","))
            chosen = cells(args.policies.split(","), args.methods.split(","), range(1, args.seeds + 1))
            HeldOutLab(args.out.resolve(), SMOKE if args.smoke else FULL, args.jobs).run(chosen)
        elif args.verb == "test-tables":
            from lab import testfigures, testtables

            if args.grid:
                logging.info("%d trained cells packed", pack(args.grid, args.out / testtables.RECORDS))
            found = testtables.tables(args.out / testtables.RECORDS, args.out)
            testfigures.draw_curves(args.out / testtables.RECORDS, args.out / "test_curves.png")
            print(f"best on the validation problems: {found['best']}")
        elif args.verb == "world2":
            from lab import world2

            if args.train:
                world2.train(args.grid, args.policies.split(","), args.seeds, args.jobs)
            if args.train or (args.grid / "cells").is_dir():
                logging.info("%d cells packed", pack(args.grid, args.out / world2.RECORDS))
            world2.tables(args.out / world2.RECORDS, args.out)
        elif args.verb == "theory":
            from lab.theory.run import write_theory

            write_theory(args.out, *((1, 100) if args.smoke else ()))
        else:
            from lab.publish import render as render_all

            for bar in render_all(args.out, args.grid / "cells" if args.grid else None):
                print(f"{'yes' if bar['holds'] else 'NO ':3}  {bar['bar']}: {bar['numbers']}")
    except UserError as error:
        print(f"lab: error: {error}", file=sys.stderr)
        return 2
    return 0


def run_grid(args: argparse.Namespace) -> None:
    families = tuple(args.families.split(",")) if args.families else tuple(f for f in FAMILIES if has_policy(f))
    if set(families) - set(FAMILIES):
        raise UserError(f"--families {args.families}: known are {', '.join(FAMILIES)}")
    for family in sorted(set(FAMILIES) - set(families), key=FAMILIES.index):
        logging.info("policy %s is left out%s", family, "" if has_policy(family) else " (make lab-policies builds it)")
    seeds = range(1, (1 if args.smoke else args.seeds) + 1)
    cells = select(grid(seeds, families), args.methods)
    Lab(args.out.resolve(), SMOKE if args.smoke else FULL, args.jobs).run(cells)


if __name__ == "__main__":
    sys.exit(main())
