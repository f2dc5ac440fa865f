"""``dcpo plan --config F.yaml --gpus N``: predict memory, traffic and step time of a run before it
is started.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from megatron_dcpo.cli import VERBS, add_config_arguments, load_config, positive_int

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help=VERBS["plan"],
        description="Plan a run from its configuration alone. Nothing is started, and model.path "
        "needs only a config.json, or is a name on the hub.",
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--gpus",
        type=positive_int,
        metavar="N",
        help="number of GPUs, at most 4096 (default: this machine)",
    )
    parser.add_argument(
        "--engine-gpus",
        type=positive_int,
        default=0,
        metavar="M",
        help="GPUs of rollout.engine=server, in addition to the N",
    )
    for name, default, what in (
        ("gpu-memory-gb", 80.0, "memory of a GPU, GB (1e9 bytes)"),
        ("peak-tflops", 989.0, "dense bf16 peak of a GPU, TFLOP/s"),
        ("mfu", 0.4, "share of the peak that training reaches, 0 to 1"),
        ("hbm-gbps", 3350.0, "memory bandwidth of a GPU, GB/s"),
        ("nvlink-gbps", 450.0, "bandwidth of a GPU within its node, GB/s each way"),
        ("link-gbps", 50.0, "bandwidth of a GPU to other nodes, GB/s each way"),
    ):
        parser.add_argument(
            f"--{name}",
            type=_positive,
            default=default,
            metavar="X",
            help=f"{what} (default {default:g})",
        )
    parser.add_argument(
        "--gpus-per-node", type=positive_int, default=8, metavar="N", help="default 8"
    )
    parser.add_argument(
        "--reserve-gb",
        type=float,
        default=5.0,
        metavar="X",
        help="context, NCCL, fragmentation, GB (default 5)",
    )
    parser.add_argument(
        "--response-tokens",
        type=positive_int,
        default=0,
        metavar="N",
        help="mean response length (default: the longest)",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="simulate a step event by event and show what waits for what",
    )
    parser.add_argument(
        "--lengths",
        metavar="FILE",
        help="response lengths to draw from, with --simulate (default: log-normal)",
    )
    parser.add_argument(
        "--judge-seconds",
        type=_positive,
        default=0.05,
        metavar="X",
        help="seconds to judge a response (default 0.05)",
    )
    parser.add_argument(
        "--judges-per-node",
        type=positive_int,
        default=16,
        metavar="N",
        help="responses judged at a time (default 16)",
    )
    parser.add_argument(
        "--fastest",
        action="store_true",
        help="the fastest layouts that fit, and the options that make them",
    )
    parser.add_argument(
        "--reshard",
        action="store_true",
        help="print only the copy plan of a weight synchronization",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.errors import EXIT_DOES_NOT_FIT, UserError

    if args.reshard:
        config = load_config(args.config, args.overrides)
        from megatron_dcpo.planning.report import reshard_facts, reshard_lines

        facts = reshard_facts(config, args.gpus)
        print(json.dumps(facts) if args.json else "\n".join(reshard_lines(facts)))
        return 0
    if args.mfu > 1:
        raise UserError(f"--mfu {args.mfu:g} is above 1; it is a share of --peak-tflops")
    if not 0 <= args.reserve_gb < args.gpu_memory_gb:
        raise UserError(
            f"--reserve-gb {args.reserve_gb:g} is outside 0 ... --gpu-memory-gb "
            f"{args.gpu_memory_gb:g}"
        )
    config = load_config(args.config, args.overrides)
    from megatron_dcpo.planning.machine import Machine, Rates, this_machine
    from megatron_dcpo.planning.plan import architecture_of, as_dict, make_plan

    if args.gpus is None:
        arch = architecture_of(config.model.path)
        machine, rates = this_machine(config, arch, args.response_tokens)
    else:
        machine = Machine(
            args.gpus,
            args.gpu_memory_gb,
            args.reserve_gb,
            args.response_tokens,
            engine_gpus=args.engine_gpus,
        )
        rates = Rates(
            peak_tflops=args.peak_tflops,
            mfu=args.mfu,
            hbm_gbps=args.hbm_gbps,
            nvlink_gbps=args.nvlink_gbps,
            link_gbps=args.link_gbps,
            gpus_per_node=args.gpus_per_node,
        )
    if args.simulate:
        from megatron_dcpo.planning.simulate import (
            Assumptions,
            read_lengths,
            scenario_facts,
            scenario_lines,
            scenarios,
        )

        assumed = Assumptions(args.judge_seconds, args.judges_per_node)
        lengths = read_lengths(args.lengths) if args.lengths else ()
        simulated = scenarios(config, machine, rates, assumed, lengths)
        if args.json:
            print(json.dumps(scenario_facts(simulated)))
        else:
            lines = scenario_lines(simulated, rates, assumed, args.lengths)
            print("\n".join(lines))
        return 0
    plan = make_plan(config, machine, rates)
    if args.fastest:
        from megatron_dcpo.planning.fastest import fastest, fastest_lines

        alternatives = fastest(config, machine, rates)
        if args.json:
            found = [{"options": one.options, **as_dict(one.plan)} for one in alternatives]
            print(json.dumps(found))
        else:
            print("\n".join(fastest_lines(alternatives, plan)))
        return 0 if alternatives else EXIT_DOES_NOT_FIT
    if args.json:
        print(json.dumps(as_dict(plan)))
    else:
        from megatron_dcpo.planning.report import print_plan

        print_plan(plan)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT
