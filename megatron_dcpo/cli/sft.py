"""``dcpo sft --config F.yaml [section.key=value ...]``: supervised training on demonstrations."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.paths import places

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.config.supervised import SupervisedConfig


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "sft",
        help=VERBS["sft"],
        description="Train a model on demonstrations. Start several processes with torchrun -m "
        "megatron_dcpo sft ...",
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
    config = _load(args)
    if args.dry_run:
        _print_facts(config, as_json=args.json)
        return 0
    from megatron_dcpo.runtime import distributed
    from megatron_dcpo.training.supervised import fine_tune

    try:
        fine_tune(config)
        if args.json and distributed.topology().rank == 0:
            with open(f"{config.run_dir}/metrics.jsonl") as file:
                sys.stdout.write(file.readlines()[-1])
    finally:
        distributed.destroy()
    return 0


def _load(args: argparse.Namespace) -> SupervisedConfig:
    if not Path(args.config).is_file():
        raise UserError(
            f"config file {args.config} does not exist{places(args.config)}"
        )
    from megatron_dcpo.config.supervised import load_supervised

    overrides = list(args.overrides)
    if args.resume:
        overrides.append(f"training.resume={args.resume}")
    return load_supervised(args.config, overrides)


def _print_facts(config: SupervisedConfig, as_json: bool) -> None:
    """Print what a run would train on."""
    from megatron_dcpo.rollout import load_tokenizer
    from megatron_dcpo.training.supervised import read_inputs, with_steps

    inputs = read_inputs(config)
    samples = [example.samples()[0] for example in inputs.examples]
    lengths = [sample.length for sample in samples]
    steps = with_steps(config, len(lengths)).training.steps
    tokenizer = load_tokenizer(config.model.path)
    facts = {
        "demonstrations": len(lengths),
        "held_out": len(inputs.held_out),
        "steps": steps,
        "longest": max(lengths),
        "mean_length": round(sum(lengths) / len(lengths), 1),
        "prompt": tokenizer.decode(samples[0].prompt_ids.tolist()),
        "response": tokenizer.decode(samples[0].response_ids.tolist()),
    }
    if as_json:
        print(json.dumps(facts))
        return
    for key, value in facts.items():
        print(f"{key:24} {value}")
