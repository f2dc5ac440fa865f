"""``dcpo probe --config F.yaml``: the gradient-conflict and variance probes on a policy, without
training it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, add_config_arguments, load_config

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "probe",
        help=VERBS["probe"],
        description="Sample a policy with a training configuration and compare, on the same "
        "responses, the accuracy and the calibration gradient of the coupled objective and of "
        "DCPO, per group of layers, under the plain and the Fisher metric; and the noise of the "
        "confidence gradient under both baselines. Nothing is trained. Under torchrun it uses the "
        "configuration's parallel layout.",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--batches",
        type=int,
        default=8,
        help="number of batches to sample, each with the responses of a step (default 8)",
    )
    parser.add_argument(
        "--out", metavar="DIR", help="directory of probe.json and probe.png (default: the run_dir)"
    )
    parser.add_argument("--json", action="store_true", help="print probe.json to stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.overrides)
    from megatron_dcpo.errors import UserError
    from megatron_dcpo.runtime import distributed
    from megatron_dcpo.training.probe import probe_policy, summary_lines, write_probe

    if args.batches < 1:
        raise UserError(f"--batches must be at least 1, got {args.batches}")
    try:
        result = probe_policy(config, args.batches)
        if distributed.topology().rank == 0:
            out = Path(args.out or config.run_dir)
            write_probe(result, out)
            if args.json:
                print(json.dumps(result, indent=1))
            else:
                print("\n".join([*summary_lines(result), f"wrote {out}"]))
    finally:
        distributed.destroy()
    return 0
