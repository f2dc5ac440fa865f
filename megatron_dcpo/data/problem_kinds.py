"""The kinds of problem that a confidence is measured within: what the data says of each problem, or
what ``--kinds`` (``evaluation.kinds``) names instead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.types import Prompt

KIND = "kind"
BENCHMARK = "benchmark"
DIGITS = "digits"
# names that are no columns of the data; ``task`` is what the samples call the benchmark
SPECIAL = (KIND, BENCHMARK, DIGITS, "task")
NO_KIND = "no kind"  # of problems whose data says none, where others have one
MOST_KINDS = 100  # more are no kinds of problem but nearly names of them

_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d*)?")

Named = tuple[str, str]  # the benchmark and the kind in it


@dataclass(frozen=True)
class ProblemKinds:
    """The kinds [N] of N problems. ``by`` is what they are named by, "" where the data names none
    and nothing else was asked for; every kind is then ``NO_KIND``.
    """

    by: str
    names: tuple[Named, ...]

    def within(self) -> tuple[Named, ...] | None:
        """Return the kinds that a confidence can be measured within; None if no problem has one."""
        if all(kind == NO_KIND for _, kind in self.names):
            return None
        return self.names


def kind_of(prompt: Prompt, by: str) -> str | None:
    """Return the kind of a problem: what the data calls its ``kind``, its ``benchmark``, the number
    of ``digits`` before the decimal point of its answer, or what a column of the data says. None if
    the problem has no such column, or no number as its answer.
    """
    if by == KIND:
        return prompt.kind
    if by in (BENCHMARK, "task"):
        return prompt.task
    if by == DIGITS:
        return _digits(prompt.ground_truth)
    value = (prompt.labels or {}).get(by, (prompt.row or {}).get(by))
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)


def kinds_of(prompts: Sequence[Prompt], by: str = "") -> ProblemKinds:
    """Return the kind of each problem by what ``by`` names, or by default what the data says."""
    kinds = [kind_of(prompt, by or KIND) for prompt in prompts]
    known = any(kind is not None for kind in kinds)
    names = []
    for prompt, kind in zip(prompts, kinds, strict=True):
        names.append((prompt.task, NO_KIND if kind is None else kind))
    return ProblemKinds(by=by or (KIND if known else ""), names=tuple(names))


def check_kinds(prompts: Sequence[Prompt], by: str) -> None:
    """Raise :class:`UserError`, which names what there is, if no problem has a kind by ``by``."""
    if not by or not prompts or any(kind_of(prompt, by) is not None for prompt in prompts):
        return
    columns = columns_of(prompts)
    raise UserError(
        f"--kinds {by}: none of the {len(prompts)} problems has it{did_you_mean(by, columns)}; "
        f"there are: {', '.join(columns)}"
    )


def columns_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return all that ``--kinds`` may name for these problems: some have it."""
    labels: dict[str, None] = {}
    for prompt in prompts:
        labels.update(dict.fromkeys(prompt.labels or ()))
        labels.update(dict.fromkeys(prompt.row or ()))
    found = []
    for name in dict.fromkeys((KIND, BENCHMARK, DIGITS, *sorted(labels))):
        if any(kind_of(prompt, name) is not None for prompt in prompts):
            found.append(name)
    return found


def possible_kinds(prompts: Sequence[Prompt]) -> list[str]:
    """Return what ``--kinds`` could name that sorts the problems into 2 to ``MOST_KINDS`` kinds."""
    found = []
    for name in columns_of(prompts):
        kinds = {(prompt.task, kind_of(prompt, name)) for prompt in prompts}
        if 2 <= len(kinds) <= MOST_KINDS and len(kinds) < len(prompts):
            found.append(name)
    return found


def described(prompts: Sequence[Prompt], by: str = "") -> dict[str, Any]:
    """Return what the kinds of the problems are named ``by``, None if there are none, and what they
    could be named by instead (``possible``).
    """
    return {"by": kinds_of(prompts, by).by or None, "possible": possible_kinds(prompts)}


def no_kinds_line(possible: Sequence[str]) -> str:
    """Return what is said where a confidence is not measured within kinds."""
    if not possible:
        return "the problems name no kinds, so there is no AUROC within kinds, nor another --kinds"
    return (
        "the problems name no kinds, so there is no AUROC within kinds; --kinds "
        f"{', '.join(possible)} would be possible"
    )


def _digits(answer: str) -> str | None:
    number = answer.strip()
    if not _NUMBER.fullmatch(number):
        return None
    return str(sum(character.isdigit() for character in number.partition(".")[0]))
