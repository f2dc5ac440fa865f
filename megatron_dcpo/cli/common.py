"""How programs are run: the options that the verbs share.

Types of command-line arguments that several verbs share.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dcpo.sandbox.judge import ProgramJudge


def add_sandbox_arguments(parser: Any) -> None:
    parser.add_argument(
        "--sandbox", default="auto", help="auto, bubblewrap, landlock, the URL of a remote sandbox, or unsafe"
    )
    parser.add_argument("--test-seconds", type=float, help="wall time of one test of a program")
    parser.add_argument("--program-seconds", type=float, help="wall time of all tests of a program")
    parser.add_argument("--memory-mb", type=whole, help="memory of a program")


def program_judge(args: argparse.Namespace) -> ProgramJudge:
    """Raises :class:`UserError` when programs cannot be run safely here."""
    from megatron_dcpo.sandbox.judge import CodeLimits, ProgramJudge

    given = {"timeout": args.test_seconds, "total_seconds": args.program_seconds, "memory_mb": args.memory_mb}
    limits = CodeLimits(**{name: value for name, value in given.items() if value is not None})
    return ProgramJudge(limits, args.sandbox)


def whole(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return value
