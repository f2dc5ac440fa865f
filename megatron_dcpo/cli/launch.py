"""``dcpo launch N [torchrun options] -- train ...``: torchrun that passes signals on and keeps the
exit status.

torchrun itself answers SIGTERM by killing its workers after a grace period, is ended by SIGUSR1,
and exits with 1 whatever its workers' status. Here the workers get the signal and act on it, and
their status is that of the launcher.
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

from megatron_dcpo.cli import VERBS, as_options, load_config, train
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
    from megatron_dcpo.rollout.serving import EngineServer

_GRACE_SECONDS = (
    20  # after one rank has failed the others have this long to end by themselves
)
_ALONE_SECONDS = 15.0


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "launch",
        help=VERBS["launch"],
        description="Start a verb in N processes on this node: dcpo launch 8 -- train --config "
        "F.yaml. "
        "Options between N and -- are torchrun's, and --engines M: on as many further GPUs (or "
        "cores) the server of "
        "rollout.engine=server is started, and again when it ends; with N = 0 it alone. It is "
        "vLLM's, or that of "
        "--engine-command. Signals reach the workers; the exit status is theirs.",
        usage="dcpo launch N [torchrun options] -- VERB ...",
    )
    parser.add_argument(
        "processes",
        metavar="N",
        help="processes on this node, or torchrun's auto, gpu, cpu",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    options, verb = _split(args.arguments)
    own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    own.add_argument("--engines", type=int, default=0)
    own.add_argument("--engine-command", default="")
    mine, options = own.parse_known_args(options)
    if not mine.engines:
        return _launch(args.processes, options, verb)
    if not args.processes.isdecimal() or mine.engines < 1:
        raise UserError(
            "--engines M, and the number of processes before it, have to be numbers: the engines "
            "come behind"
        )
    with _engines(
        int(args.processes), mine.engines, mine.engine_command, verb
    ) as server:
        return (
            _launch(args.processes, options, verb)
            if int(args.processes)
            else server.serve()
        )


def _engines(processes: int, engines: int, other: str, verb: list[str]) -> EngineServer:
    """Return the server of the run that ``verb`` starts."""
    from megatron_dcpo.rollout.serving import EngineServer, server_command

    parser = argparse.ArgumentParser(add_help=False)
    train.add_parser(parser.add_subparsers(dest="verb"))
    words = as_options(verb)
    if words[0] != "train":
        raise UserError(
            f"--engines is for train, not {words[0]}: only a training has a server of its own"
        )
    known, rest = parser.parse_known_args(words)
    config = load_config(known.config, [*known.overrides, *rest])
    command = server_command(config, engines, other)
    return EngineServer(
        command,
        config.rollout.endpoint,
        processes,
        engines,
        Path(config.run_dir) / "engines.log",
    )


def _launch(processes: str, options: list[str], verb: list[str]) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args
    from torch.distributed.run import run as torchrun

    from megatron_dcpo.runtime import signals
    from megatron_dcpo.runtime.files import allow_open_files

    allow_open_files()
    if not any(
        option.startswith(("--nnodes", "--rdzv", "--master", "--standalone"))
        for option in options
    ):
        options = ["--standalone", *options]
    os.environ[signals.LAUNCHER_PID] = str(os.getpid())
    # torchrun keeps the signals that only mean an end; the three that mean "stop in good order" are
    # passed on.
    os.environ.setdefault(
        "CUDA_DEVICE_MAX_CONNECTIONS", "1"
    )  # Megatron's overlap needs the order of its launches
    options += ["--nproc-per-node", processes, *_numa_binding(options)]
    options = [
        "--signals-to-handle",
        "SIGHUP,SIGQUIT",
        "--shutdown-timeout",
        str(_GRACE_SECONDS),
        *options,
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
            print(
                printable(f"dcpo launch: {_describe(*first_failure(error.failures))}"),
                file=sys.stderr,
            )
        return status
    except (
        RendezvousError,
        DistError,
    ) as error:  # found out by the launcher before its workers' status came
        if used := port_in_use(error, "--master-port"):
            raise UserError(used) from None
        print(
            f"dcpo launch: no rendezvous at {parsed.rdzv_endpoint}: another node did not come, "
            "has ended, or the link to it "
            f"is gone ({one_line(error, 200)}); --resume auto continues after the last checkpoint",
            file=sys.stderr,
        )
        return EXIT_PEER_LOST
    return 0


def exit_status(exit_codes: list[int]) -> int:
    """Return one status for several failed workers: first what a user has to correct, then what a
    requeue continues.

    Bad input (2) > a worker's own failure > stopped and saved (99, 130) > lost or killed (98).
    """
    codes = set(exit_codes)
    if EXIT_USER_ERROR in codes:
        return EXIT_USER_ERROR
    own = sorted(code for code in codes if code > 0 and code != EXIT_PEER_LOST)
    return own[0] if own else EXIT_PEER_LOST


def first_failure(failures: dict[int, Any]) -> tuple[int, Any]:
    """Return the rank and failure that came first; those of ranks that were ended because of it
    come last.
    """
    ended = (-signal.SIGTERM, EXIT_PEER_LOST)
    return min(
        failures.items(),
        key=lambda item: (item[1].exitcode in ended, item[1].timestamp, item[0]),
    )


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return torchrun's options and the verb's arguments. argparse drops a ``--`` that follows N at
    once.
    """
    at = arguments.index("--") if "--" in arguments else 0
    options, verb = (
        arguments[:at],
        [word for word in arguments[at : at + 1] if word != "--"] + arguments[at + 1 :],
    )
    if not verb or verb[0].startswith("-"):
        raise UserError(
            "name a verb after --, as in dcpo launch 8 [torchrun options] -- train --config F.yaml"
        )
    return options, verb


def _numa_binding(options: list[str]) -> list[str]:
    """Return torchrun's option that keeps each rank on the CPUs beside its GPU, and so its memory;
    nothing where that is chosen by the user, or cannot be done here.
    """
    from megatron_dcpo.runtime.device import capabilities

    chosen = any(
        option.startswith(("--numa-binding", "--numa_binding")) for option in options
    )
    several = len(glob.glob("/sys/devices/system/node/node[0-9]*")) > 1
    if (
        chosen
        or not several
        or not capabilities().separate_memory
        or shutil.which("numactl") is None
    ):
        return []
    return ["--numa-binding", "node"]


def _end_when_alone() -> None:
    """End the launcher when its own workers have ended: torchrun waits minutes for that of a node
    that has failed.
    """
    begun, since = False, time.monotonic()
    while True:
        time.sleep(1)
        if _workers():
            begun, since = True, time.monotonic()
        elif begun and time.monotonic() - since > _ALONE_SECONDS:
            print(
                "dcpo launch: all workers of this node have ended, torchrun waits for another "
                "node: leaving; "
                "--resume auto continues after the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_PEER_LOST)


def _pass_on(number: int, _: object) -> None:
    workers = _workers()
    for worker in workers:
        with contextlib.suppress(OSError):  # it has just ended
            os.kill(worker, number)
    if not workers:  # none has begun: nothing is lost
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
    """Return in a line how a rank ended."""
    who = f"rank {rank} (pid {failure.pid})"
    if failure.exitcode < 0:
        return f"{who} was killed by {signal.Signals(-failure.exitcode).name}"
    ended = f"{who} ended with status {failure.exitcode}"
    if os.path.isfile(failure.error_file):
        said = failure.error_file_data.get("message")
        if said:
            return f"{ended}: {said}"
    return ended
