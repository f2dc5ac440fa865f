"""Options and types of arguments that several verbs share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dcpo.sandbox.local import CodeLimits


def add_sandbox_arguments(parser: Any) -> None:
    """Where programs run, and their limits (``program_limits``)."""
    parser.add_argument(
        "--sandbox",
        default="auto",
        metavar="WHERE",
        help="where programs run: auto, bubblewrap, landlock, the URL of a remote sandbox, or unsafe (default auto)",
    )
    parser.add_argument(
        "--test-seconds", type=float, metavar="S", help="wall time of one test of a program (default 6)"
    )
    parser.add_argument(
        "--program-seconds", type=float, metavar="S", help="wall time of all tests of a program (default 60)"
    )
    parser.add_argument("--memory-mb", type=positive_int, metavar="MB", help="memory of a program (default 1024)")


def program_limits(args: argparse.Namespace) -> CodeLimits:
    """The limits as given, the defaults of ``CodeLimits`` otherwise. Raises :class:`UserError`."""
    from megatron_dcpo.sandbox.local import CodeLimits

    names = ("test_seconds", "program_seconds", "memory_mb")
    return CodeLimits(**{name: vars(args)[name] for name in names if vars(args).get(name) is not None})


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value
