"""The command line: one module per verb, each with ``add_parser(subparsers)`` and ``run(args) -> exit status``."""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from megatron_dcpo import __version__
from megatron_dcpo.errors import UserError

VERBS = ("train", "evaluate", "report", "judge", "calibrate", "convert", "objective", "probe", "doctor")
_DISK_REFUSES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Bad input is one line on stderr and status 2; results go to stdout, logs to stderr."""
    parser = argparse.ArgumentParser(
        prog="dcpo", description="Reinforcement learning from verifiable rewards, accurate and calibrated."
    )
    parser.add_argument("--version", action="version", version=f"megatron-dcpo {__version__}")
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in VERBS:
        importlib.import_module(f"megatron_dcpo.cli.{verb}").add_parser(subparsers)
    for subparser in subparsers.choices.values():
        subparser.add_argument("--debug", action="store_true", help="show tracebacks and debug logs")
    args = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if args.debug else logging.INFO,
        format="%(asctime)s %(name)s: %(message)s" if args.debug else "%(message)s",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "urllib3", "matplotlib", "torch", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    try:
        return int(args.run(args))
    except (UserError, OSError) as error:
        refused = isinstance(error, UserError) or error.errno in _DISK_REFUSES
        if args.debug or not refused:
            raise
        if os.environ.get("RANK", "0") == "0" or _ranks_differ():
            print(f"dcpo {args.verb}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dcpo {args.verb}: interrupted", file=sys.stderr)
        return 130


def _ranks_differ() -> bool:
    """Before the process groups exist every rank meets the same error, and one line is enough."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_initialized()
