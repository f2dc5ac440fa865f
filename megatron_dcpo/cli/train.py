"""``dcpo train --config F.yaml [section.key=value ...]``: RL training with any method."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, load_config

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help=VERBS["train"],
        description="Train a policy by RL. Start several processes with torchrun -m megatron_dcpo "
        "train ...",
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="YAML file with the run's options",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="options that override the file",
    )
    parser.add_argument(
        "--resume",
        choices=("none", "auto"),
        help="auto continues from the newest complete checkpoint",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check options, model, tokenizer and data without training",
    )
    parser.add_argument(
        "--allow-missing",
        action="store_true",
        help="with --dry-run: model and data may be elsewhere",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the last step's metrics to stdout as JSON",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.runtime import signals
    from megatron_dcpo.runtime.files import allow_open_files

    if not args.dry_run:
        allow_open_files()
        signals.install_handlers()
        signals.exit_with_launcher()
    overrides = list(args.overrides)
    if args.resume:
        overrides.append(f"training.resume={args.resume}")
    config = load_config(args.config, overrides)
    if args.dry_run:
        from megatron_dcpo.training.dry_run import describe

        facts = describe(config, args.allow_missing)
        if args.json:
            print(json.dumps(facts))
        else:
            for key, value in facts.items():
                print(f"{key:24} {value}")
        return 0
    from megatron_dcpo.runtime import distributed
    from megatron_dcpo.training.loop import train

    try:
        train(config)
        if args.json and distributed.topology().rank == 0:
            with open(f"{config.run_dir}/metrics.jsonl") as file:
                sys.stdout.write(file.readlines()[-1])
    finally:
        distributed.destroy()
    return 0
