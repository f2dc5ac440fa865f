"""What the configuration says of a source of problems: its name, its path with options, and the
verifier of its answers; and the problems that a verifier cannot take.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_dcpo.config import Config, JudgingConfig, SourceConfig
from megatron_dcpo.config.field_types import BUILT_IN, VerifierChoice, members
from megatron_dcpo.data.datasets import Record, task_name
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.brought import is_gym
from megatron_dcpo.runtime.plugins import load_part
from megatron_dcpo.types import Prompt

logger = logging.getLogger(__name__)

# the function that scores answers to Reasoning Gym's problems
GYM_VERIFIER = "megatron_dcpo.judging.gym:score"


def verifier_of(source: SourceConfig, judging: JudgingConfig) -> VerifierChoice:
    """Return the verifier of a source of problems: the one that the source names, Reasoning Gym's,
    or ``judging.verifier``.
    """
    if source.verifier:
        return source.verifier
    if is_gym(source.path):
        return GYM_VERIFIER
    return judging.verifier


def path_of(source: SourceConfig) -> str:
    """Return the path of a source, with its options if it is a task of Reasoning Gym."""
    if is_gym(source.path):
        with_options = load_part("megatron_dcpo.data.gym_tasks:gym_path")
        return str(with_options(source.path, source.options, source.size, source.seed))
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
