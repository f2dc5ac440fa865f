"""Find the verifier of a name, and what its kind says of it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.config.field_types import (
    BUILT_IN,
    QUESTIONS,
    VerifierChoice,
    WeightedVerifier,
    members,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import AnswerForm, Verifier
from megatron_dcpo.judging.source_verifiers import GYM_VERIFIER
from megatron_dcpo.judging.verifier_kind import PackedTests, Problems, VerifierKind
from megatron_dcpo.judging.weighted import Member, WeightedSum, common_form, labels
from megatron_dcpo.runtime.plugins import load_part

FindVerifier = Callable[[VerifierChoice], tuple[Verifier, AnswerForm]]
# the kinds of verifier by their names; their modules are imported when a name is used
_KINDS = MappingProxyType(
    {
        "math": "megatron_dcpo.judging.math.verifier:MATH",
        "code": "megatron_dcpo.judging.programs:CODE",
        "choice": "megatron_dcpo.judging.questions:CHOICE",
        "exact": "megatron_dcpo.judging.questions:TEXT",
        "f1": "megatron_dcpo.judging.questions:TEXT",
        "forecast": "megatron_dcpo.judging.forecasts:FORECAST",
        GYM_VERIFIER: "megatron_dcpo.judging.function_verifier:REASONING_GYM",
    }
)
_ENDPOINT = "megatron_dcpo.judging.endpoint:ENDPOINT"
_FUNCTION = "megatron_dcpo.judging.function_verifier:FUNCTION"


def kind_of(name: str) -> VerifierKind:
    """Return the kind of the verifier ``name``: built in, an address, or the import path of a
    function.
    """
    path = _KINDS.get(name)
    if path is None:
        path = _ENDPOINT if "://" in name else _FUNCTION
    kind: VerifierKind = load_part(path)
    return kind


def is_users(verifier: VerifierChoice) -> bool:
    """Return whether a verifier, or one of several, is the user's. Such a verifier
    reads the columns of the row.
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
    if form in ("choice", "forecast"):
        return form
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
    digest = kind_of(name).digest
    code = f"{name} {_package_code()}" if digest is None else digest(name)
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
def _package_code() -> str:
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
        check_name = kind_of(member.name).check_name
        if check_name is not None:
            check_name(member.name)
    form_of(verifier)


def check_problems(verifier: VerifierChoice, problems: Problems, source: str) -> None:
    """Raise :class:`UserError` for the first problem that the verifier, or one of several, cannot
    judge, because it has no answer of the verifier's form, or several if the verifier takes one.
    """
    for member in members(verifier):
        if member.name in BUILT_IN and member.name != "forecast":
            _refuse_outcomes(member.name, problems, source)
        check = kind_of(member.name).check_problems
        if check is not None:
            check(member.name, problems, source)


def _refuse_outcomes(name: str, problems: Problems, source: str) -> None:
    for problem in problems:
        if problem.form == "forecast":
            raise UserError(
                f"{source}: {problem.prompt_id} has an outcome and no answer, which "
                f"judging.verifier={name} judges; set judging.verifier=forecast"
            )


def form_of(verifier: VerifierChoice) -> AnswerForm:
    """Return the form of the answers that a verifier judges. Raises :class:`UserError` if several
    verifiers have none in common.
    """
    return common_form(kind_of(member.name).form for member in members(verifier))


def equivalence(verifier: VerifierChoice) -> Callable[[str, str], bool]:
    """Return the test of whether two answers that ``verifier`` judges are the same: of several
    verifiers that of programs, of options or of texts, in this order.
    """
    names = {member.name for member in members(verifier)}
    for name in ("code", "choice", "exact", "f1"):
        same = kind_of(name).same if name in names else None
        if same is not None:
            return same
    mathematics = kind_of("math").same
    assert mathematics is not None
    return mathematics


def verifiers(options: JudgingConfig, tests: PackedTests) -> FindVerifier:
    """Return a function that finds a verifier and builds each once. ``tests`` are the tests
    of programs, by their keys.

    The function raises :class:`UserError` if there is no such verifier, or if programs cannot be
    run safely on this machine.
    """

    @functools.cache
    def named(name: str) -> Verifier:
        return kind_of(name).build(name, options, tests)

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
