"""Which verifier a name stands for, and how the answers that it judges are marked."""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.config.field_types import BUILT_IN, QUESTIONS
from megatron_dcpo.data.gym import VERIFIER
from megatron_dcpo.judging.answers import BOXED, FENCED, FREE, AnswerForm
from megatron_dcpo.judging.endpoint import EndpointVerifier
from megatron_dcpo.judging.function_verifier import FunctionVerifier, load_function
from megatron_dcpo.judging.judge import Verifier
from megatron_dcpo.judging.math.pool import verify_answers
from megatron_dcpo.judging.programs import PackedTests, ProgramVerifier
from megatron_dcpo.judging.questions import question_verifier

FindVerifier = Callable[[str], tuple[Verifier, AnswerForm]]


def is_users(name: str) -> bool:
    """Return whether a verifier is the user's own, which reads the columns of the row."""
    return name not in BUILT_IN


def reads_rows(name: str) -> bool:
    """Return whether a verifier reads the columns of the row: a user's own, or one of questions."""
    return name in QUESTIONS or is_users(name)


def verifier_for(form: str, named: str, registered: bool = False) -> str:
    """Return the verifier of problems whose answer is of a ``form`` (``data.prompts.ASKS``), where
    the user ``named`` one; a verifier of questions is not for the mathematics of a ``registered``
    benchmark.
    """
    if is_users(named):
        return named
    if form in ("choice", "short"):
        return "choice" if form == "choice" else "f1" if named == "f1" else "exact"
    return "math" if registered and named in QUESTIONS else named


def check_verifier(name: str) -> None:
    """Raise :class:`UserError` where the user's function is not there, or has another signature.
    Asks no server.
    """
    if is_users(name) and "://" not in name:
        load_function(name)


def verifiers(options: JudgingConfig, tests: PackedTests) -> FindVerifier:
    """Return what gives the verifier of a name, each built once; ``tests``: of programs, by their
    key.

    It raises :class:`UserError` where there is none, or where programs cannot be run safely here.
    """

    @functools.cache
    def find(name: str) -> tuple[Verifier, AnswerForm]:
        if name == "math":
            return verify_answers, BOXED
        if name == "code":
            return ProgramVerifier(tests, options.limits, options.sandbox), FENCED
        if name in QUESTIONS:
            return question_verifier(name, options), BOXED
        if "://" in name:
            return EndpointVerifier(name, options), FREE
        return FunctionVerifier(name, options), BOXED if name == VERIFIER else FREE

    return find
