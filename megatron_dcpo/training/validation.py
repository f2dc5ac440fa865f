"""What a run knows of its validation: problems that are held out, and what the policy reaches on
them. ``held_out_validator.py`` carries it out where a run has ``evaluation.interval``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_dcpo.types import Prompt


@dataclass(frozen=True)
class Validation:
    """The result of one validation: ``evaluation/BENCHMARK/METRIC``, and what writes the judged
    responses to a file.
    """

    metrics: dict[str, float]
    write: Callable[[Path], None]


class Validator(Protocol):
    """Measures the policy on held-out problems. All methods are collective."""

    def is_due(self, step: int) -> bool:
        """Return whether the policy after ``step`` is to be validated."""
        ...

    def validate(self) -> Validation | None:
        """Return what the policy reaches whose weights the engines have; None when a signal cut the
        validation short. Raises :class:`EngineError` on all ranks if an engine failed.
        """
        ...


class HeldOutProblems(Protocol):
    """Held-out problems: the ``prompts`` by their ids, and the length of the ``longest`` one."""

    @property
    def prompts(self) -> Mapping[str, Prompt]: ...

    @property
    def longest(self) -> int: ...
