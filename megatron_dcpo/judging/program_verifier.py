"""Programs as answers: the last fenced program of a response against the tests of its problem."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence

from megatron_dcpo.data.code_problems import unpack_tests
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.code import CodeLimits, CodePool, CodeVerdict

PackedTests = Mapping[str, bytes]  # by their key, which is the ground truth of a programming problem
Pairs = Sequence[tuple[str, str]]  # text before the confidence, key of its tests


class ProgramJudge:
    """Judges many batches with the same warm sandboxes, which start with the first program and end with the process.

    Raises :class:`UserError` at once where no sandbox works.
    """

    def __init__(self, limits: CodeLimits | None = None, sandbox: str = "auto", workers: int | None = None) -> None:
        self.pool = CodePool(limits=limits or CodeLimits(), sandbox=sandbox, workers=workers or cores())
        atexit.register(self.pool.close)

    def __call__(self, pairs: Pairs, tests: PackedTests) -> list[CodeVerdict]:
        """The verdict on each pair. Raises :class:`UserError` for a key without tests."""
        unpacked = {}
        for _, key in pairs:
            if key not in unpacked:
                if key not in tests:
                    raise UserError(f"no tests for {key!r}: the data of a code run must be programming problems")
                unpacked[key] = unpack_tests(tests[key])
        futures = [self.pool.submit(text, unpacked[key], where=key, marker=None) for text, key in pairs]
        return [future.result() for future in futures]

    def verifier(self, tests: PackedTests) -> Callable[[Pairs], list[bool]]:
        """The same as training asks: right or wrong."""
        return lambda pairs: [verdict.correct == 1 for verdict in self(pairs, tests)]


def cores() -> int:
    """The cores this process may use, divided among the ranks of torchrun on this machine."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
