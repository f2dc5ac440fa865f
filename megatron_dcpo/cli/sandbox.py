"""How programs are run: the options that the verbs share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dcpo.judging.code import CodeLimits


def add_sandbox_arguments(parser: Any) -> None:
    parser.add_argument("--sandbox", default="auto", help="auto, bwrap, landlock, an http(s) URL, or unsafe")


def check_sandbox(args: argparse.Namespace) -> None:
    """Raises :class:`UserError` when programs cannot be run safely here."""


def limits_of(args: argparse.Namespace) -> CodeLimits:
    from megatron_dcpo.judging.code import CodeLimits

    return CodeLimits()
