"""The problems of an evaluation or a validation, each benchmark with the judge of its responses."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from megatron_dcpo.config import Config, JudgingConfig, SourceConfig
from megatron_dcpo.config.field_types import BUILT_IN, QUESTIONS, VerifierChoice, members
from megatron_dcpo.data.answers import is_structured
from megatron_dcpo.data.benchmarks import (
    BENCHMARKS,
    LoadedBenchmark,
    load_benchmark,
    name_of,
    parse_specs,
    path_in,
)
from megatron_dcpo.data.datasets import Record, task_name
from megatron_dcpo.data.environments import is_environment
from megatron_dcpo.data.gym import VERIFIER, gym_path, is_gym
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluate import Equivalent, equivalent_math
from megatron_dcpo.evaluation.programs import same_program
from megatron_dcpo.judging.function_verifier import with_verdicts
from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.judging.programs import PackedTests
from megatron_dcpo.judging.questions import check_questions, same_answer, same_choice
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.judging.verifiers import (
    FindVerifier,
    digest_of,
    is_users,
    verifier_for,
    verifiers,
)
from megatron_dcpo.types import Judgement, Prompt, Response

logger = logging.getLogger(__name__)


class TokenJudge(Protocol):
    """A judge that also takes the tokenizer's tokens, for the responses of thinking models."""

    def __call__(
        self,
        responses: Sequence[Response],
        prompts: Mapping[str, Prompt],
        tokens: TokenBytes | None = None,
    ) -> Sequence[Judgement]: ...


@dataclass(frozen=True)
class Problems:
    """A benchmark with the judge of its responses.

    ``tests`` are the tests of its programs, by their keys. ``equivalent`` decides whether two
    answers are the same. ``template`` is the prompt template of the source that matches the
    benchmark, if that source names one. ``verifier`` is what its responses are judged by, and
    ``digest`` that of the verifier's code and options (``judging.verifiers.digest_of``).
    """

    benchmark: LoadedBenchmark
    tests: PackedTests
    judge: TokenJudge
    equivalent: Equivalent
    template: str | None = None
    verifier: VerifierChoice = ""
    digest: str = ""


@dataclass(frozen=True)
class BenchmarkOptions:
    """How benchmark files are read: the directory to look in, whether documented defects are
    repaired, whether programs without assertions are kept, and the columns of files that no source
    matches.
    """

    data_dir: str | None = None
    corrections: bool = False
    untested: bool = False
    columns: Mapping[str, str] = field(default_factory=dict)


def load_problems(
    benchmarks: str,
    judging: JudgingConfig,
    sources: Sequence[SourceConfig] = (),
    options: BenchmarkOptions | None = None,
) -> list[Problems]:
    """Load a list of benchmarks, separated by commas.

    Programs are judged by their tests, and Reasoning Gym's problems by its scorers. Other problems
    are judged by the verifier of the source in ``sources`` that matches the benchmark by name or
    path, or else by ``judging.verifier``, if it suits the form of the answers.

    Raises :class:`UserError` for everything that can be wrong with the data, such as answers of
    forms that different verifiers judge in one benchmark, or with running programs on this machine.
    """
    options = options or BenchmarkOptions()
    specs = {name_of(spec): spec for spec in parse_specs(benchmarks)}
    source_of: dict[str, SourceConfig | None] = {}
    for name, spec in specs.items():
        source_of[name] = find_source(name, path_in(spec), sources)
    named_verifiers: dict[str, VerifierChoice] = {}
    loaded: list[LoadedBenchmark] = []
    tests: dict[str, bytes] = {}
    for name, spec in specs.items():
        source = source_of[name]
        named_verifiers[name] = _named_verifier(spec, source, judging)
        benchmark = load_benchmark(
            spec,
            options.data_dir,
            options.corrections,
            options.untested,
            keep_columns=is_users(named_verifiers[name]),
            columns=options.columns if source is None else source.columns,
        )
        for warning in benchmark.warnings:
            logger.warning(warning)
        loaded.append(benchmark)
        tests.update(tests_of(benchmark))
    find = verifiers(judging, tests)
    problems = []
    for benchmark in loaded:
        verifier = _verifier_of_benchmark(benchmark, named_verifiers[benchmark.name])
        answered = with_answers(verifier, benchmark.records, benchmark.source)
        benchmark = replace(benchmark, records=tuple(answered))
        check_answers(verifier, benchmark.records, benchmark.source)
        source = source_of[benchmark.name]
        problems.append(
            Problems(
                benchmark=benchmark,
                tests=tests_of(benchmark),
                judge=judge_of(judging, find, verifier),
                equivalent=equivalence(verifier),
                template=None if source is None else source.template,
                verifier=verifier,
                digest=digest_of(verifier, judging),
            )
        )
    return problems


def check_answers(
    verifier: VerifierChoice, problems: Sequence[Record | Prompt], source: str
) -> None:
    """Raise :class:`UserError` for the first problem that the verifier, or one of several, cannot
    judge, because it has no answer of the verifier's form, or several if the verifier takes one.
    """
    for member in members(verifier):
        if member.name in BUILT_IN:
            _check_plain_answers(member.name, problems, source)
        check_questions(member.name, problems, source)
        if member.name == "math":
            _check_one_answer(problems, source)


def _check_one_answer(problems: Iterable[Record | Prompt], source: str) -> None:
    for problem in problems:
        answer = (problem.row or {}).get("answer")
        if isinstance(answer, list | Mapping):
            raise UserError(
                f"{source}: {problem.prompt_id}: the answer has several texts, {answer!r:.60}; "
                "judging.verifier=math takes one, exact and f1 take any of them"
            )


def _check_plain_answers(name: str, problems: Iterable[Record | Prompt], source: str) -> None:
    """Raise :class:`UserError` for the first answer that is the JSON text of a list or an object.
    Rows whose columns are kept, for a user's verifier or for ``data.order``, may have one; the
    built-in verifier ``name`` would compare it as it stands.
    """
    for problem in problems:
        answer = (problem.row or {}).get("answer")
        if isinstance(answer, str) and is_structured(answer):
            raise UserError(
                f"{source}: {problem.prompt_id}: the answer is the JSON text {answer!r:.60}; where "
                f"a row's columns are kept, judging.verifier={name} needs a text, a number or a "
                "list of texts"
            )


AnyProblem = TypeVar("AnyProblem", Record, Prompt)


def with_answers(
    verifier: VerifierChoice, problems: Sequence[AnyProblem], source: str
) -> list[AnyProblem]:
    """Return the problems that have an answer, if a built-in verifier, or one of several, needs it;
    how many are dropped is logged. Rows whose columns are kept may have none.

    Raises :class:`UserError` if none is left.
    """
    if all(member.name not in BUILT_IN for member in members(verifier)):
        return list(problems)
    kept = []
    for problem in problems:
        if problem.answer if isinstance(problem, Record) else problem.ground_truth:
            kept.append(problem)
    dropped = len(problems) - len(kept)
    if dropped:
        logger.warning("%s: dropped %d rows without an answer", source, dropped)
    if not kept:
        raise UserError(f"{source}: no problem with an answer in it")
    return kept


def judges_programs(verifier: VerifierChoice) -> bool:
    """Return whether a verifier, or one of several, is ``code``."""
    return any(member.name == "code" for member in members(verifier))


def tests_of(benchmark: LoadedBenchmark) -> dict[str, bytes]:
    """Return the tests of a benchmark's programs, by their keys."""
    return {r.answer: r.tests for r in benchmark.records if r.tests is not None}


def _named_verifier(
    spec: str, source: SourceConfig | None, judging: JudgingConfig
) -> VerifierChoice:
    """Return the verifier that is named for a benchmark: by the source that matches it, by the
    benchmark itself if it is an environment, or by ``judging.verifier``.
    """
    if is_environment(path_in(spec)) and (source is None or not source.verifier):
        return path_in(spec)
    return judging.verifier if source is None else verifier_of(source, judging)


def _verifier_of_benchmark(benchmark: LoadedBenchmark, named: VerifierChoice) -> VerifierChoice:
    """Return the verifier of a benchmark, given the one that the user ``named``. Raises
    :class:`UserError` if its rows need different ones.
    """
    if benchmark.is_gym:
        return VERIFIER
    if is_environment(benchmark.source):
        return named
    registered = benchmark.name in BENCHMARKS
    # rows without an answer, which with_answers drops, say nothing about the others
    records = [record for record in benchmark.records if record.answer] or benchmark.records
    first_of: dict[VerifierChoice, Record] = {}
    for record in records:
        first_of.setdefault(_verifier_of_record(record, named, registered), record)
    if len(first_of) > 1:
        one, other = list(first_of.values())[:2]
        raise UserError(
            f"{benchmark.source}: the answer of row {one.index + 1} is judged as {one.form} and "
            f"that of row {other.index + 1} as {other.form}, and a benchmark has one verifier; "
            "split the file into one benchmark per form of answer"
        )
    return next(iter(first_of))


def _verifier_of_record(record: Record, named: VerifierChoice, registered: bool) -> VerifierChoice:
    """Return the verifier of one problem: programs by their tests, other answers by their form."""
    if record.tests is not None:
        return named if judges_programs(named) else "code"
    if judges_programs(named):
        named = "math"
    return verifier_for(record.form, named, registered)


def equivalence(verifier: VerifierChoice) -> Equivalent:
    """Return the test of whether two answers that ``verifier`` judges are the same."""
    names = [member.name for member in members(verifier)]
    if "code" in names:
        return same_program
    if "choice" in names:
        return same_choice
    if any(name in QUESTIONS for name in names):
        return same_answer
    return equivalent_math


def judge_of(judging: JudgingConfig, find: FindVerifier, chosen: VerifierChoice) -> TokenJudge:
    """Return the judge of the ``chosen`` verifier."""
    verifier, form = find(chosen)
    verifier = with_verdicts(verifier, judging)
    return partial(judge_many, marker=judging.marker, verifier=verifier, form=form)


# ---------------------------------------------------------------------------- sources of a training


def verifier_of(source: SourceConfig, judging: JudgingConfig) -> VerifierChoice:
    """Return the verifier of a source of problems: the one that the source names, Reasoning Gym's,
    the path of an environment, or ``judging.verifier``.
    """
    if source.verifier:
        return source.verifier
    if is_gym(source.path):
        return VERIFIER
    if is_environment(source.path):
        return path_of(source)
    return judging.verifier


def path_of(source: SourceConfig) -> str:
    """Return the path of a source, with its options if a library makes or brings its problems."""
    if is_gym(source.path) or is_environment(source.path):
        return gym_path(source.path, source.options, source.size, source.seed)
    return source.path


def source_name(source: SourceConfig) -> str:
    """Return the name of a source: the one given, or else the name of its file."""
    return source.name or task_name(source.path)


def named_sources(config: Config) -> dict[str, SourceConfig]:
    """Return the sources of ``data.path`` by their names. Raises :class:`UserError` if two have the
    same name.
    """
    named: dict[str, SourceConfig] = {}
    for source in config.data.sources:
        name = source_name(source)
        if name in named:
            raise UserError(
                f"data.path: two sources are called {name}; give one of them another name"
            )
        named[name] = source
    return named


def find_source(name: str, path: str, sources: Iterable[SourceConfig]) -> SourceConfig | None:
    """Return the source that matches a benchmark: one with its name, or else with its path, which
    may be empty. None if there is none.
    """
    same_path = None
    for source in sources:
        if source_name(source) == name:
            return source
        if path and _is_same_file(source.path, path):
            same_path = source
    return same_path


def _is_same_file(one: str, other: str) -> bool:
    if one == other:
        return True
    return Path(one).exists() and Path(one).resolve() == Path(other).resolve()
