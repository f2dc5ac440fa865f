"""``dcpo plan --config F.yaml --gpus N``: predict memory, traffic and step time of a run before it
is started.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, positive_int, refuse_given
from megatron_dcpo.cli.config_file import add_config_arguments, load_config

if TYPE_CHECKING:
    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.config import Config
    from megatron_dcpo.planning.machine import Machine, Rates
    from megatron_dcpo.planning.plan import Plan

# what Machine and Rates take of the GPUs that --gpus N names
_OF_MACHINE = ("gpu_memory_gb", "reserve_gb", "engine_gpus")
_OF_RATES = ("peak_tflops", "mfu", "hbm_gbps", "nvlink_gbps", "link_gbps", "gpus_per_node")


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
            metavar="X",
            help=f"{what} (default {default:g})",
        )
    parser.add_argument("--gpus-per-node", type=positive_int, metavar="N", help="default 8")
    parser.add_argument(
        "--reserve-gb",
        type=float,
        metavar="X",
        help="context, NCCL, fragmentation, GB (default 5)",
    )
    parser.add_argument(
        "--response-tokens",
        type=positive_int,
        metavar="N",
        help="mean response length (default: the longest)",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--fastest",
        action="store_true",
        help="the fastest layouts that fit, and the options that make them",
    )
    shown.add_argument(
        "--reshard",
        action="store_true",
        help="print only the copy plan of a weight synchronization",
    )
    shown.add_argument(
        "--rehearse",
        action="store_true",
        help="run the job's own code once, at this size, on a device that does not exist; prints "
        "its memory, traffic and waits, or the operation that does not fit",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def run(args: argparse.Namespace) -> int:
    from megatron_dcpo.errors import EXIT_DOES_NOT_FIT

    _refuse_what_is_not_read(args)
    if args.reshard:
        config = load_config(args.config, args.overrides)
        from megatron_dcpo.planning.plan_tables import reshard_facts, reshard_lines

        facts = reshard_facts(config, args.gpus)
        print(json.dumps(facts) if args.json else "\n".join(reshard_lines(facts)))
        return 0
    config = load_config(args.config, args.overrides)
    if args.rehearse:
        return _rehearse(args, config)
    from megatron_dcpo.planning.machine import this_machine
    from megatron_dcpo.planning.plan import architecture_of, as_dict, make_plan

    if args.gpus is None:
        arch = architecture_of(config.model.path)
        machine, rates = this_machine(config, arch, args.response_tokens or 0)
    else:
        machine, rates = _named_machine(args)
    plan = make_plan(config, machine, rates)
    if args.gpus is not None and not args.fastest:
        plan = _as_rehearsed(plan)
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
        from megatron_dcpo.planning.plan_tables import print_plan

        print_plan(plan)
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _as_rehearsed(plan: Plan) -> Plan:
    """Return the plan with what a rehearsal of the same job counted, if there was one."""
    from megatron_dcpo.planning.rehearsed import with_rehearsal
    from megatron_dcpo.rehearsal.kept import kept

    ranks = kept(plan.config, plan.machine.gpus)
    return plan if ranks is None else with_rehearsal(plan, ranks)


def _rehearse(args: argparse.Namespace, config: Config) -> int:
    """Rehearse the job of ``args.gpus``, or of as few as its layout needs."""
    from megatron_dcpo.rehearsal.ranks import least_gpus, rehearse_job
    from megatron_dcpo.rehearsal.rehearsal_lines import report_lines

    gpus = args.gpus or least_gpus(config.parallel)
    ranks = rehearse_job(args.config, args.overrides, config, gpus)
    print(json.dumps(ranks) if args.json else "\n".join(report_lines(ranks, gpus)))
    return 0


def _refuse_what_is_not_read(args: argparse.Namespace) -> None:
    """Raise :class:`UserError` for an option without effect on this plan."""
    unread = (*_OF_MACHINE, *_OF_RATES, "response_tokens")
    if args.reshard:
        refuse_given(args, unread, "does not go with --reshard, which counts bytes alone")
    if args.rehearse:
        refuse_given(args, unread, "does not go with --rehearse, which estimates nothing")
    if args.gpus is None:
        why = "goes with --gpus N; without it this machine is planned for"
        refuse_given(args, (*_OF_MACHINE, *_OF_RATES), why)


def _named_machine(args: argparse.Namespace) -> tuple[Machine, Rates]:
    """Return the machine that the options name, and its rates. Raises :class:`UserError`."""
    from megatron_dcpo.errors import UserError
    from megatron_dcpo.planning.machine import Machine, Rates

    rates = Rates(**_given(args, _OF_RATES))
    machine = Machine(gpus=args.gpus, **_given(args, (*_OF_MACHINE, "response_tokens")))
    if rates.mfu > 1:
        raise UserError(f"--mfu {rates.mfu:g} is above 1; it is a share of --peak-tflops")
    if not 0 <= machine.reserve_gb < machine.gpu_memory_gb:
        raise UserError(
            f"--reserve-gb {machine.reserve_gb:g} is outside 0 ... --gpu-memory-gb "
            f"{machine.gpu_memory_gb:g}"
        )
    return machine, rates


def _given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return the options that are given, by name."""
    values = {name: getattr(args, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}
