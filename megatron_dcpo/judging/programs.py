"""R for programs: run the program of a response on the tests of its problem, in the sandbox."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence

from megatron_dcpo.data.code_problems import unpack_tests
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import FENCED, Attempt, Outcome
from megatron_dcpo.judging.same_program import same_program
from megatron_dcpo.judging.verifier_kind import PackedTests, VerifierKind, check_plain_answers
from megatron_dcpo.runtime import cores_per_rank
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.program_judge import CodePool

# problems whose tests stay unpacked, because the responses to one problem finish at various times
KEPT = 32


class ProgramVerifier:
    """The verifier (``judge.Verifier``) of programming problems whose packed tests are ``tests``.

    All batches share the same warm sandboxes, which start with the first program and end with the
    process. Raises :class:`UserError` at once if no sandbox works, and when called with a ground
    truth that is not the key of tests.
    """

    def __init__(
        self,
        tests: PackedTests,
        limits: CodeLimits | None = None,
        sandbox: str = "auto",
        workers: int | None = None,
    ) -> None:
        self.tests = tests
        self._unpacked = functools.lru_cache(maxsize=KEPT)(lambda key: unpack_tests(tests[key]))
        self.pool = CodePool(limits=limits, sandbox=sandbox, workers=workers or cores_per_rank())
        atexit.register(self.pool.close)

    def __call__(self, attempts: Sequence[Attempt]) -> list[Outcome]:
        """Return the outcome of each program (``answer``) by the tests whose key is its ground
        truth.
        """
        for attempt in attempts:
            if attempt.truth not in self.tests:
                raise UserError(
                    f"no tests for {attempt.truth!r}: the data of a code run must be programming "
                    "problems"
                )
        pending = []
        for attempt in attempts:
            tests = self._unpacked(attempt.truth)
            pending.append(self.pool.submit(attempt.answer, tests, where=attempt.truth))
        outcomes = []
        for future in pending:
            verdict = future.result()
            outcomes.append(Outcome(verdict.correct == 1, verdict.category))
        return outcomes


CODE = VerifierKind(
    form=FENCED,
    build=lambda name, options, tests: ProgramVerifier(tests, options.limits, options.sandbox),
    same=same_program,
    check_problems=check_plain_answers,
)
