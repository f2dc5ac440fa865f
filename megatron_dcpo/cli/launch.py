"""``dcpo launch N [torchrun options] -- train ...``: torchrun that passes signals on and keeps the
exit status.

On SIGTERM, torchrun itself kills its workers after a grace period; SIGUSR1 ends it; and it exits
with 1 whatever the status of its workers. Here the workers get the signal and act on it, and the
launcher exits with their status.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dcpo.cli import VERBS, as_options, refuse_given, train
from megatron_dcpo.cli.config_file import load_config
from megatron_dcpo.errors import (
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    EXIT_REQUEUE,
    EXIT_USER_ERROR,
    UserError,
    one_line,
    port_in_use,
)
from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from megatron_dcpo.cli import Subparsers
    from megatron_dcpo.rollout.server_launch import EngineServer

# after one rank has failed, the others have this long to end by themselves
_GRACE_SECONDS = 20
_ALONE_SECONDS = 15.0
_RENDEZVOUS = ("--nnodes", "--rdzv", "--master", "--standalone")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "launch",
        help=VERBS["launch"],
        description="Start a verb in N processes on this node: dcpo launch 8 -- train --config "
        "F.yaml. Options between N and -- are torchrun's. --engines M also starts the server of "
        "rollout.engine=server on M further GPUs (or cores), and restarts it if it ends; with "
        "N = 0 it starts only the server. The server is vLLM's, or the one that --engine-command "
        "starts. Signals reach the workers; the exit status is theirs.",
        usage="dcpo launch N [torchrun options] -- VERB ...",
    )
    parser.add_argument(
        "processes", metavar="N", help="processes on this node, or torchrun's auto, gpu, cpu"
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options, verb = _split(args.arguments)
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--engines", type=int, default=0)
    parser.add_argument("--engine-command", default="")
    ours, torchrun_options = parser.parse_known_args(options)
    if not ours.engines:
        refuse_given(ours, ["engine_command"], "goes with --engines M")
        return _launch(args.processes, torchrun_options, verb)
    if not args.processes.isdecimal() or ours.engines < 1:
        raise UserError(
            "--engines M and the number of processes N must be numbers: the engines use the GPUs "
            "after the first N"
        )
    processes = int(args.processes)
    with _engines(processes, ours.engines, ours.engine_command, verb) as server:
        if not processes:
            return server.serve()
        return _launch(args.processes, torchrun_options, verb)


def _engines(processes: int, engines: int, other: str, verb: list[str]) -> EngineServer:
    """Return the server of the run that ``verb`` starts."""
    from megatron_dcpo.rollout.server_launch import (
        EngineServer,
        log_name,
        own_endpoint,
        server_command,
    )
    from megatron_dcpo.training.provenance import with_model_here
    from megatron_dcpo.training.run import longest_of

    parser = argparse.ArgumentParser(add_help=False)
    train.add_parser(parser.add_subparsers(dest="verb"))
    words = as_options(verb)
    if words[0] != "train":
        raise UserError(
            f"--engines is for train, not {words[0]}: only train starts an engine server"
        )
    known, rest = parser.parse_known_args(words)
    config = with_model_here(load_config(known.config, [*known.overrides, *rest]))
    command = server_command(config, engines, longest_of(config), other)
    endpoint = own_endpoint(config)
    return EngineServer(
        command, endpoint, processes, engines, Path(config.run_dir) / log_name(endpoint)
    )


def _launch(processes: str, options: list[str], verb: list[str]) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    from megatron_dcpo.runtime import signals
    from megatron_dcpo.runtime.files import allow_open_files

    for option in options:
        if option.startswith(("--nproc-per-node", "--nproc_per_node")):
            raise UserError(f"{option}: N of dcpo launch N says it; remove it")
    allow_open_files()
    if not any(option.startswith(_RENDEZVOUS) for option in options):
        options = ["--standalone", *options]
    os.environ[signals.LAUNCHER_PID] = str(os.getpid())
    # Megatron's overlap relies on the order in which kernels are launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    # torchrun handles the signals that just end a run; the three that ask for an orderly stop are
    # passed on to the workers.
    options = [
        "--signals-to-handle",
        "SIGHUP,SIGQUIT",
        "--shutdown-timeout",
        str(_GRACE_SECONDS),
        *options,
        "--nproc-per-node",
        processes,
        *_numa_binding(options),
    ]
    for number in signals.STOP_SIGNALS:
        signal.signal(number, _pass_on)
    parsed = parse_args([*options, "-m", "megatron_dcpo", *verb])
    if not parsed.max_restarts:
        threading.Thread(target=_end_when_alone, daemon=True).start()
    try:
        torchrun(parsed)
    except ChildFailedError as error:
        status = exit_status([failure.exitcode for failure in error.failures.values()])
        if status not in (EXIT_REQUEUE, EXIT_INTERRUPTED):
            rank, failure = first_failure(error.failures)
            message = f"dcpo launch: {_describe(rank, failure)}"
            print(printable(message), file=sys.stderr)
        return status
    except (RendezvousError, DistError) as error:  # before the workers' status was known
        used = port_in_use(error, "--master-port")
        if used:
            raise UserError(used) from None
        print(
            f"dcpo launch: no rendezvous at {parsed.rdzv_endpoint}: another node did not join, "
            f"has ended, or cannot be reached ({one_line(error, 200)}); --resume auto continues "
            "after the last checkpoint",
            file=sys.stderr,
        )
        return EXIT_PEER_LOST
    return 0


def exit_status(exit_codes: list[int]) -> int:
    """Return one status for several failed workers, in this order of precedence.

    Bad input (2), an error of a worker, stopped and saved (99, 130), lost or killed (98).
    """
    codes = set(exit_codes)
    if EXIT_USER_ERROR in codes:
        return EXIT_USER_ERROR
    errors = sorted(code for code in codes if code > 0 and code != EXIT_PEER_LOST)
    return errors[0] if errors else EXIT_PEER_LOST


def first_failure(failures: dict[int, Any]) -> tuple[int, Any]:
    """Return the first failure and its rank. Failures of ranks that were ended because of another
    one come last.
    """
    ended = (-signal.SIGTERM, EXIT_PEER_LOST)
    return min(
        failures.items(), key=lambda item: (item[1].exitcode in ended, item[1].timestamp, item[0])
    )


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return torchrun's options and the verb with its arguments. argparse drops a ``--`` that
    directly follows N.
    """
    options: list[str] = []
    verb = arguments
    if "--" in arguments:
        at = arguments.index("--")
        options = arguments[:at]
        verb = arguments[at + 1 :]
    if not verb or verb[0].startswith("-"):
        raise UserError(
            "name a verb after --, as in dcpo launch 8 [torchrun options] -- train --config F.yaml"
        )
    return options, verb


def _numa_binding(options: list[str]) -> list[str]:
    """Return torchrun's option that keeps each rank and its memory on the CPUs next to its GPU.

    Return nothing if the user has chosen a binding, if this machine cannot bind, or if this job has
    no CPU of some node: torch ends a rank whose GPU is next to such a one.
    """
    from megatron_dcpo.runtime.device import capabilities

    if any(option.startswith(("--numa-binding", "--numa_binding")) for option in options):
        return []
    nodes = [Path(node) for node in glob.glob("/sys/devices/system/node/node[0-9]*")]
    if len(nodes) < 2:
        return []
    if not capabilities().separate_memory or shutil.which("numactl") is None:
        return []
    ours = os.sched_getaffinity(0)
    for node in nodes:
        if ours.isdisjoint(_cpus((node / "cpulist").read_text())):
            return []
    return ["--numa-binding", "node"]


def _cpus(text: str) -> set[int]:
    """Return the numbers of a list of the kernel's, as ``0-3,8``; of none for an empty one."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _end_when_alone() -> None:
    """End the launcher when the workers of this node have ended, since torchrun waits minutes for
    the workers of a node that has failed.
    """
    begun = False
    since = time.monotonic()
    while True:
        time.sleep(1)
        if _workers():
            begun = True
            since = time.monotonic()
        elif begun and time.monotonic() - since > _ALONE_SECONDS:
            print(
                "dcpo launch: all workers of this node have ended and torchrun still waits for "
                "another node: leaving; --resume auto continues after the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_PEER_LOST)


def _pass_on(number: int, _: object) -> None:
    workers = _workers()
    for worker in workers:
        with contextlib.suppress(OSError):  # it has just ended
            os.kill(worker, number)
    if not workers:  # none has started, so nothing is lost
        raise SystemExit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE)


def _workers() -> list[int]:
    """Return the processes that this one started to run a verb and that have not ended."""
    import psutil

    workers = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "megatron_dcpo" in child.cmdline():  # not the engines' server
                workers.append(child.pid)
    return workers


def _describe(rank: int, failure: ProcessFailure) -> str:
    """Return one line that says how a rank ended."""
    who = f"rank {rank} (pid {failure.pid})"
    if failure.exitcode < 0:
        return f"{who} was killed by {signal.Signals(-failure.exitcode).name}"
    ended = f"{who} ended with status {failure.exitcode}"
    if os.path.isfile(failure.error_file):
        said = failure.error_file_data.get("message")
        if said:
            return f"{ended}: {said}"
    return ended
