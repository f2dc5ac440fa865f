"""Programs as answers: the last fenced program of a response against the tests of its problem."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatron_dcpo.data.code_problems import unpack_tests
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.code import CodeLimits, CodeVerdict, judge_programs

if TYPE_CHECKING:
    from megatron_dcpo.judging.judge import Verifier

PackedTests = Mapping[str, bytes]  # by their key, which is the ground truth of a programming problem


def run_programs(
    pairs: Sequence[tuple[str, str]],
    tests: PackedTests,
    *,
    limits: CodeLimits | None = None,
    sandbox: str = "auto",
    workers: int | None = None,
) -> list[CodeVerdict]:
    """The verdict on each (response text, key of its tests). Raises :class:`UserError` for a key without tests."""
    unpacked = {}
    for _, key in pairs:
        if key not in unpacked:
            if key not in tests:
                raise UserError(f"no tests for {key!r}: the data of a code run must be programming problems")
            unpacked[key] = unpack_tests(tests[key])
    items = [(text, unpacked[key]) for text, key in pairs]
    return judge_programs(items, limits=limits or CodeLimits(), sandbox=sandbox, workers=workers or cores())


def program_verifier(tests: PackedTests, limits: CodeLimits, sandbox: str, workers: int | None = None) -> Verifier:
    """``run_programs`` as training asks: right or wrong."""
    return partial(_right_or_wrong, tests=tests, limits=limits, sandbox=sandbox, workers=workers)


def _right_or_wrong(
    pairs: Sequence[tuple[str, str]], tests: PackedTests, limits: CodeLimits, sandbox: str, workers: int | None
) -> list[bool]:
    found = run_programs(pairs, tests, limits=limits, sandbox=sandbox, workers=workers)
    return [verdict.correct == 1 for verdict in found]


def cores() -> int:
    """The cores this process may use, divided among the ranks of torchrun on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
