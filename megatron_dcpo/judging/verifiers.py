"""Find the verifier of a name, and the form of the answers that it judges."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.config.field_types import (
    BUILT_IN,
    QUESTIONS,
    VerifierChoice,
    WeightedVerifier,
    members,
)
from megatron_dcpo.data.environments import is_environment
from megatron_dcpo.data.gym import VERIFIER
from megatron_dcpo.judging.answers import BOXED, FENCED, FREE, AnswerForm
from megatron_dcpo.judging.endpoint import EndpointVerifier
from megatron_dcpo.judging.environments import EnvironmentVerifier, scores_digest
from megatron_dcpo.judging.function_verifier import FunctionVerifier, load_function
from megatron_dcpo.judging.judge import Verifier
from megatron_dcpo.judging.math.pool import verify_answers
from megatron_dcpo.judging.programs import PackedTests, ProgramVerifier
from megatron_dcpo.judging.questions import question_verifier
from megatron_dcpo.judging.weighted import Member, WeightedSum, common_form, labels
from megatron_dcpo.runtime.plugins import source_digest

FindVerifier = Callable[[VerifierChoice], tuple[Verifier, AnswerForm]]


def is_users(verifier: VerifierChoice) -> bool:
    """Return whether a verifier, or one of several, is the user's, or an environment's. Such a
    verifier reads the columns of the row.
    """
    return any(member.name not in BUILT_IN for member in members(verifier))


def reads_rows(verifier: VerifierChoice) -> bool:
    """Return whether a verifier reads the columns of the row: a user's, or one for questions."""
    asks = any(member.name in QUESTIONS for member in members(verifier))
    return asks or is_users(verifier)


def verifier_for(form: str, named: VerifierChoice, registered: bool = False) -> VerifierChoice:
    """Return the verifier for problems whose answers have a ``form`` (``data.prompts.ASKS``), given
    the one that the user ``named``. A verifier of questions does not apply to the mathematics of a
    ``registered`` benchmark.

    Of several verifiers each is replaced as it would be alone; the weights of those that become the
    same one are added.
    """
    if isinstance(named, str):
        return _verifier_for(form, named, registered)
    weights: dict[str, float] = {}
    for member in named:
        name = _verifier_for(form, member.name, registered)
        weights[name] = weights.get(name, 0.0) + member.weight
    return tuple(WeightedVerifier(name, weight) for name, weight in weights.items())


def _verifier_for(form: str, named: str, registered: bool) -> str:
    if is_users(named):
        return named
    if form == "choice":
        return "choice"
    if form == "short":
        return "f1" if named == "f1" else "exact"
    if registered and named in QUESTIONS:
        return "math"
    return named


def digest_of(verifier: VerifierChoice, options: JudgingConfig) -> str:
    """Return a short digest of all that a verdict of the ``verifier`` depends on besides the
    response and the row: its code, here or in a user's file, the options, and of several verifiers
    their weights. A server is known by its address only.
    """
    if isinstance(verifier, str):
        return _digest_of_name(verifier, options)
    weighted = []
    for member in verifier:
        weighted.append((_digest_of_name(member.name, options), member.weight))
    return hashlib.sha256(repr(weighted).encode()).hexdigest()[:16]


def _digest_of_name(name: str, options: JudgingConfig) -> str:
    if is_environment(name):
        code = scores_digest(name)
    elif is_users(name):
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


def check_verifier(verifier: VerifierChoice) -> None:
    """Raise :class:`UserError` if a function of the user's does not exist or has an unknown
    signature, or if several verifiers judge answers of different forms. Servers are not asked.
    """
    for member in members(verifier):
        name = member.name
        if is_users(name) and "://" not in name and not is_environment(name):
            load_function(name)
    form_of(verifier)


def form_of(verifier: VerifierChoice) -> AnswerForm:
    """Return the form of the answers that a verifier judges. Raises :class:`UserError` if several
    verifiers have none in common.
    """
    forms = []
    for member in members(verifier):
        if member.name in ("math", VERIFIER, *QUESTIONS):
            forms.append(BOXED)
        else:
            forms.append(FENCED if member.name == "code" else FREE)
    return common_form(forms)


def verifiers(options: JudgingConfig, tests: PackedTests) -> FindVerifier:
    """Return a function that finds a verifier and builds each once. ``tests`` are the tests
    of programs, by their keys.

    The function raises :class:`UserError` if there is no such verifier, or if programs cannot be
    run safely on this machine.
    """

    @functools.cache
    def named(name: str) -> Verifier:
        if name == "math":
            return verify_answers
        if name == "code":
            return ProgramVerifier(tests, options.limits, options.sandbox)
        if name in QUESTIONS:
            return question_verifier(name, options)
        if is_environment(name):
            return EnvironmentVerifier(name, options)
        if "://" in name:
            return EndpointVerifier(name, options)
        return FunctionVerifier(name, options)

    @functools.cache
    def find(verifier: VerifierChoice) -> tuple[Verifier, AnswerForm]:
        form = form_of(verifier)
        if isinstance(verifier, str):
            return named(verifier), form
        parts = []
        for label, member in zip(labels(verifier), verifier, strict=True):
            parts.append(Member(label, member.weight, named(member.name)))
        return WeightedSum(parts, options), form

    return find
