"""Find the verifier of a name, and the form of the answers that it judges."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
from megatron_dcpo.runtime.plugins import source_digest

FindVerifier = Callable[[str], tuple[Verifier, AnswerForm]]


def is_users(name: str) -> bool:
    """Return whether a verifier is the user's. Such a verifier reads the columns of the row."""
    return name not in BUILT_IN


def reads_rows(name: str) -> bool:
    """Return whether a verifier reads the columns of the row: a user's, or one for questions."""
    return name in QUESTIONS or is_users(name)


def verifier_for(form: str, named: str, registered: bool = False) -> str:
    """Return the verifier for problems whose answers have a ``form`` (``data.prompts.ASKS``), given
    the one that the user ``named``. A verifier of questions does not apply to the mathematics of a
    ``registered`` benchmark.
    """
    if is_users(named):
        return named
    if form == "choice":
        return "choice"
    if form == "short":
        return "f1" if named == "f1" else "exact"
    if registered and named in QUESTIONS:
        return "math"
    return named


def digest_of(name: str, options: JudgingConfig) -> str:
    """Return a short digest of all that a verdict of the verifier ``name`` depends on besides the
    response and the row: its code, here or in a user's file, and the options. A server is known by
    its address only.
    """
    if is_users(name):
        code = name
        if "://" not in name:
            code += source_digest(name, "judging.verifier")
    else:
        code = f"{name} {_own_code()}"
    read = (
        options.marker,
        options.threshold,
        options.graded,
        options.test_seconds,
        options.program_seconds,
        options.memory_mb,
    )
    return hashlib.sha256(repr((code, read)).encode()).hexdigest()[:16]


@functools.cache
def _own_code() -> str:
    """Return a digest of this package's verifiers and sandbox, and of the libraries they use."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for part in ("judging", "sandbox"):
        for file in sorted((package / part).rglob("*.py")):
            digest.update(file.read_bytes())
    for library in ("math-verify", "sympy", "reasoning-gym"):
        with suppress(PackageNotFoundError):
            digest.update(f"{library} {version(library)}".encode())
    return digest.hexdigest()


def check_verifier(name: str) -> None:
    """Raise :class:`UserError` if the user's function does not exist or has an unknown signature.
    Servers are not asked.
    """
    if is_users(name) and "://" not in name:
        load_function(name)


def verifiers(options: JudgingConfig, tests: PackedTests) -> FindVerifier:
    """Return a function that finds the verifier of a name and builds each once. ``tests`` are those
    of programs, by their keys.

    The function raises :class:`UserError` if there is no such verifier, or if programs cannot be
    run safely on this machine.
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
