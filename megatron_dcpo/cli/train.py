"""``dcpo train --config F.yaml [section.key=value ...]``: RL training with any method."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, refuse_given
from megatron_dcpo.cli.config_file import add_config_arguments, load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.config import Config


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help=VERBS["train"],
        description="Train a policy by RL. Start several processes with torchrun -m megatron_dcpo "
        "train ...",
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="with --dry-run: model and data may be elsewhere",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="with --dry-run: then run the code of a step once on a device that does not exist, "
        "for as few GPUs as the layout needs (dcpo plan --rehearse --gpus N takes another number)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not args.dry_run:
        refuse_given(args, ["allow_missing", "rehearse"], "goes with --dry-run")
    prepare_process(args)
    config = load_config(args.config, overrides_of(args))
    if args.dry_run:
        from megatron_dcpo.training.dry_run import describe

        print_facts(describe(config, args.allow_missing), as_json=args.json)
        if args.rehearse:
            _rehearse(args, config)
        return 0
    from megatron_dcpo.training.loop import train

    carry_out(lambda: train(config), config.run_dir, as_json=args.json)
    return 0


def _rehearse(args: argparse.Namespace, config: Config) -> None:
    """Rehearse the job and print what it showed, on stderr if stdout has JSON."""
    from megatron_dcpo.rehearsal.ranks import least_gpus, rehearse_job
    from megatron_dcpo.rehearsal.rehearsal_lines import report_lines

    gpus = least_gpus(config.parallel)
    ranks = rehearse_job(args.config, overrides_of(args), config, gpus)
    print("\n".join(report_lines(ranks, gpus)), file=sys.stderr if args.json else sys.stdout)


# ------------------------------------------------------ what dcpo train and dcpo sft have in common
def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verb that trains: configuration, ``--resume``, ``--dry-run``,
    ``--json``.
    """
    add_config_arguments(parser)
    parser.add_argument(
        "--resume",
        choices=("none", "auto", "strict"),
        help="auto continues after the newest intact checkpoint, strict only after the newest",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check options, model, tokenizer and data without training",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the last step's metrics to stdout as JSON"
    )


def prepare_process(args: argparse.Namespace) -> None:
    """Set the limit of open files and the handlers of signals, unless nothing will be trained."""
    if args.dry_run:
        return
    from megatron_dcpo.runtime import signals
    from megatron_dcpo.runtime.files import allow_open_files

    allow_open_files()
    signals.install_handlers()
    signals.exit_with_launcher()


def overrides_of(args: argparse.Namespace) -> list[str]:
    """Return the overrides of the command line, ``--resume`` among them. Raises
    :class:`UserError` if both are there and differ.
    """
    overrides = list(args.overrides)
    if args.resume:
        resume = f"training.resume={args.resume}"
        for override in overrides:
            if override.startswith("training.resume=") and override != resume:
                raise UserError(f"--resume {args.resume} and {override} differ; remove one of them")
        overrides.append(resume)
    return overrides


def print_facts(facts: Mapping[str, Any], as_json: bool) -> None:
    """Print the results of ``--dry-run``."""
    if as_json:
        print(json.dumps(facts))
        return
    for key, value in facts.items():
        print(f"{key:24} {value}")


def carry_out(train: Callable[[], None], run_dir: str, as_json: bool) -> None:
    """Train, print what has come of it, or the last step's metrics as JSON, and close the process
    groups.
    """
    from megatron_dcpo.runtime import distributed
    from megatron_dcpo.training.outcome import outcome, write_cards

    try:
        train()
        if distributed.topology().rank > 0:
            return
        write_cards(Path(run_dir))
        if as_json:
            with open(f"{run_dir}/metrics.jsonl") as file:
                sys.stdout.write(file.readlines()[-1])
            return
        for line in outcome(Path(run_dir)):
            print(printable(line))
    finally:
        distributed.destroy()
