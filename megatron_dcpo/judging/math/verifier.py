"""The verifier of mathematics."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_dcpo.data.datasets import Record
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import BOXED
from megatron_dcpo.judging.math.key_forms import report_keys
from megatron_dcpo.judging.math.pool import equivalent_math, verify_answers
from megatron_dcpo.judging.verifier_kind import (
    Problems,
    VerifierKind,
    answer_in_row,
    check_plain_answers,
)


def _check_problems(name: str, problems: Problems, source: str) -> None:
    """Raise :class:`UserError` for the first problem with several answers; say what the keys look
    like.
    """
    check_plain_answers(name, problems, source)
    for problem in problems:
        answer = answer_in_row(problem)
        if isinstance(answer, list | Mapping):
            raise UserError(
                f"{source}: {problem.prompt_id}: the answer has several texts, {answer!r:.60}; "
                "judging.verifier=math takes one, exact and f1 take any of them"
            )
    keys = [
        problem.answer if isinstance(problem, Record) else problem.ground_truth
        for problem in problems
    ]
    report_keys(keys, source)


MATH = VerifierKind(
    form=BOXED,
    build=lambda name, options, tests: verify_answers,
    same=equivalent_math,
    check_problems=_check_problems,
)
