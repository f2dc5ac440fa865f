"""Is an answer of mathematics right? The content of the last box against the key, in worker processes."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dcpo.judging.answers import Outcome
from megatron_dcpo.judging.math.pool import shared_pool


def verify_answers(pairs: Sequence[tuple[str | None, str]]) -> list[Outcome]:
    """The outcome of each (answer or None, key), side by side. No answer is a wrong one.

    Nothing raises: what cannot be parsed, or not in time, is wrong.
    """
    verdicts = iter(equivalent_many([(answer, key) for answer, key in pairs if answer is not None]))
    return [Outcome(answer is not None and next(verdicts)) for answer, _ in pairs]


def equivalent_many(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether each (answer, key) is the same number, set, expression ...; answers without their boxes."""
    return shared_pool().verify([(answer.strip(), key.strip()) for answer, key in pairs])
