"""``dcpo sft --config F.yaml [section.key=value ...]``: supervised training on demonstrations."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS
from megatron_dcpo.cli.config_file import check_config_exists
from megatron_dcpo.cli.train import (
    add_run_arguments,
    carry_out,
    overrides_of,
    prepare_process,
    print_facts,
)

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.config.supervised_sections import SupervisedConfig


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "sft",
        help=VERBS["sft"],
        description="Train a model on demonstrations. Start several processes with torchrun -m "
        "megatron_dcpo sft ...",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    prepare_process(args)
    check_config_exists(args.config)
    from megatron_dcpo.config.supervised_sections import load_supervised

    config = load_supervised(args.config, overrides_of(args))
    if args.dry_run:
        print_facts(_described(config), as_json=args.json)
        return 0
    from megatron_dcpo.training.supervised import fine_tune

    carry_out(lambda: fine_tune(config), config.run_dir, as_json=args.json)
    return 0


def _described(config: SupervisedConfig) -> dict[str, Any]:
    """Return what a run would train on."""
    from megatron_dcpo.config.supervised_sections import supervised_without_effect
    from megatron_dcpo.training.dry_run import describe_weights
    from megatron_dcpo.training.provenance import check_run_dir, with_model_here
    from megatron_dcpo.training.supervised import read_inputs, read_model, with_steps

    config = with_model_here(config, weights=False)
    inputs = read_inputs(config)
    samples = [example.sample() for example in inputs.examples]
    lengths = [sample.length for sample in samples]
    steps = with_steps(config, len(lengths)).training.steps
    check_run_dir(config.run_dir, config.training.resume)
    tokenizer, arch = read_model(config)
    return {
        "model": f"{arch.name}{describe_weights(config.model.path, arch)}",
        "demonstrations": len(lengths),
        "held_out": len(inputs.held_out),
        "steps": steps,
        "without effect": "; ".join(supervised_without_effect(config)) or "nothing",
        "longest": max(lengths),
        "mean_length": round(sum(lengths) / len(lengths), 1),
        "prompt": tokenizer.decode(samples[0].prompt_ids.tolist()),
        "response": tokenizer.decode(samples[0].response_ids.tolist()),
    }
