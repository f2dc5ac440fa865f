"""What becomes of a program: R, and why it is not 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Category = Literal[
    "passed",
    "wrong",  # ran to its end, and a test says no
    "runtime_error",  # an exception, a non-zero exit status, or an end before the tests were done
    "timeout",
    "memory",
    "output_limit",
    "forbidden",  # ended by what the sandbox refused it
    "no_program",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
# Exit statuses of ``inside/program.py`` (96-98) and signals (SIGXFSZ, SIGSYS).
EXITS: dict[int, Category] = {96: "memory", 97: "forbidden", 98: "output_limit", -25: "output_limit", -31: "forbidden"}


@dataclass(frozen=True)
class CodeVerdict:
    """``correct`` is R; ``category`` says why not; ``detail`` is for people."""

    correct: int
    category: Category
    detail: str = ""
