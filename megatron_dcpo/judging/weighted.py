"""A verifier made of verifiers: its score is the weighted mean of their scores.

For weights w_m > 0 and scores s_m in [0, 1] of the members m,

    score = sum_m w_m s_m / sum_m w_m,

which is 1 only if every member's score is 1. The response is right if the score is at least
``judging.threshold``; with ``judging.graded`` the score is R. The threshold is about this score: of
``f1`` and of users' verifiers the scores themselves are averaged, and math, code, exact and choice
score 1 or 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.config.field_types import BUILT_IN, WeightedVerifier
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import (
    BOXED,
    FENCED,
    FREE,
    AnswerForm,
    Attempt,
    Outcome,
    Verifier,
)

# Decimals of a score, so that weights of 0.6 and 0.3 reach a threshold of 0.9.
_DECIMALS = 12


@dataclass(frozen=True)
class Member:
    """A verifier of a :class:`WeightedSum`, its weight, and the ``label`` of its score."""

    label: str
    weight: float
    verify: Verifier


class WeightedSum:
    """The verifier (``judge.Verifier``) whose score is the weighted mean of its members' scores.

    A response that one member does not judge is not judged. The values that are logged
    are the ``score``, the score of each member under its label, and what the member logged itself
    under ``label/name``.
    """

    def __init__(self, members: Sequence[Member], options: JudgingConfig) -> None:
        self.members = tuple(members)
        self.options = options
        largest = max(member.weight for member in members)
        # no sum of these overflows
        self.weights = [member.weight / largest for member in members]

    def __call__(self, attempts: Sequence[Attempt]) -> list[Outcome | None]:
        """Return the outcome of each response."""
        by_member = [member.verify(attempts) for member in self.members]
        combined: list[Outcome | None] = []
        for by_members in zip(*by_member, strict=True):
            outcomes = [outcome for outcome in by_members if outcome is not None]
            is_complete = len(outcomes) == len(self.members)
            combined.append(self._combined(outcomes) if is_complete else None)
        return combined

    def _combined(self, outcomes: Sequence[Outcome]) -> Outcome:
        scores = [_score(outcome) for outcome in outcomes]
        weighted = [w * s for w, s in zip(self.weights, scores, strict=True)]
        score = round(math.fsum(weighted) / math.fsum(self.weights), _DECIMALS)
        logged: dict[str, Any] = {"score": score}
        for member, own, outcome in zip(self.members, scores, outcomes, strict=True):
            logged[member.label] = own
            for name, value in (outcome.logged or {}).items():
                if name != "score":
                    logged[f"{member.label}/{name}"] = value
        categories = [outcome.category for outcome in outcomes if outcome.category]
        return Outcome(
            correct=score >= self.options.threshold,
            category=categories[0] if categories else None,  # of a program
            score=score if self.options.graded else None,
            logged=logged,
        )


def _score(outcome: Outcome) -> float:
    """Return the score of a member: the one that it logged, or else 1 if it is right."""
    logged: Mapping[str, Any] = outcome.logged or {}
    return float(logged.get("score", outcome.correct))


def labels(members: Iterable[WeightedVerifier]) -> list[str]:
    """Return a short name for each member: ``my_reward.right`` of ``path/my_reward.py:right``, an
    address without ``https://``, a built-in name as it is. Equal ones are numbered.
    """
    short = [_label(member.name) for member in members]
    counts = Counter(short)
    seen: Counter[str] = Counter()
    found = []
    for name in short:
        seen[name] += 1
        found.append(f"{name}_{seen[name]}" if counts[name] > 1 else name)
    return found


def _label(name: str) -> str:
    if "://" in name:
        return name.partition("://")[2].replace(":", "_").rstrip("/")
    if name in BUILT_IN:
        return name
    source, _, function = name.rpartition(":")
    module = Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]
    return f"{module}.{function}"


def common_form(forms: Iterable[AnswerForm]) -> AnswerForm:
    """Return the form of the answers that all members judge: a box or a program if any member needs
    it, else the whole text. Raises :class:`UserError` if members need a box and a program.
    """
    needed = {form.opener: form for form in forms}
    if BOXED.opener in needed and FENCED.opener in needed:
        raise UserError(
            "judging.verifier: code judges a program, and another of its members a boxed answer; "
            "combine code with verifiers of yours only"
        )
    if FENCED.opener in needed:
        return FENCED
    return BOXED if BOXED.opener in needed else FREE
