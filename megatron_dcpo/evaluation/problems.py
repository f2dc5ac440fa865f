"""The problems of an evaluation or a validation, each benchmark with the judge of its responses."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from megatron_dcpo.config import JudgingConfig, SourceConfig
from megatron_dcpo.config.field_types import VerifierChoice, members
from megatron_dcpo.data.benchmarks import (
    BENCHMARKS,
    LoadedBenchmark,
    load_benchmark,
    name_of,
    parse_specs,
    path_in,
)
from megatron_dcpo.data.datasets import Record
from megatron_dcpo.data.row_reader import PLAIN, RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluate import Equivalent
from megatron_dcpo.judging.judge import judge_many
from megatron_dcpo.judging.source_verifiers import (
    GYM_VERIFIER,
    find_source,
    verifier_of,
    with_answers,
)
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.judging.verdicts import with_verdicts
from megatron_dcpo.judging.verifier_kind import PackedTests
from megatron_dcpo.judging.verifiers import (
    FindVerifier,
    check_problems,
    digest_of,
    equivalence,
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
    ) -> Sequence[Judgement | None]: ...


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


def load_problems(
    benchmarks: str,
    judging: JudgingConfig,
    sources: Sequence[SourceConfig] = (),
    reading: RowOptions = PLAIN,
) -> list[Problems]:
    """Load a list of benchmarks, separated by commas. ``reading`` says how the rows of files are
    read that no source matches.

    Programs are judged by their tests, and Reasoning Gym's problems by its scorers. Other problems
    are judged by the verifier of the source in ``sources`` that matches the benchmark by name or
    path, or else by ``judging.verifier``, if it suits the form of the answers.

    Raises :class:`UserError` for everything that can be wrong with the data, such as answers of
    forms that different verifiers judge in one benchmark, or with running programs on this machine.
    """
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
        of_source = reading
        if source is not None:
            of_source = replace(reading, columns=source.columns, row=source.row)
        keeps_columns = is_users(named_verifiers[name])
        benchmark = load_benchmark(spec, keep_columns=keeps_columns, reading=of_source)
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
        check_problems(verifier, benchmark.records, benchmark.source)
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


def judges_programs(verifier: VerifierChoice) -> bool:
    """Return whether a verifier, or one of several, is ``code``."""
    return any(member.name == "code" for member in members(verifier))


def tests_of(benchmark: LoadedBenchmark) -> dict[str, bytes]:
    """Return the tests of a benchmark's programs, by their keys."""
    return {r.answer: r.tests for r in benchmark.records if r.tests is not None}


def _named_verifier(
    spec: str, source: SourceConfig | None, judging: JudgingConfig
) -> VerifierChoice:
    """Return the verifier that is named for a benchmark: by the source that matches it, or by
    ``judging.verifier``.
    """
    return judging.verifier if source is None else verifier_of(source, judging)


def _verifier_of_benchmark(benchmark: LoadedBenchmark, named: VerifierChoice) -> VerifierChoice:
    """Return the verifier of a benchmark, given the one that the user ``named``. Raises
    :class:`UserError` if its rows need different ones.
    """
    if benchmark.is_gym:
        return GYM_VERIFIER
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


def judge_of(judging: JudgingConfig, find: FindVerifier, chosen: VerifierChoice) -> TokenJudge:
    """Return the judge of the ``chosen`` verifier."""
    verifier, form = find(chosen)
    verifier = with_verdicts(verifier, judging)
    return partial(judge_many, marker=judging.marker, verifier=verifier, form=form)
