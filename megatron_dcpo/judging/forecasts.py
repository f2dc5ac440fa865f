"""Forecasts: nothing in the response is right or wrong but the probability that it states, so the
verdict is what happened, whatever the response says.

What a response is worth then is the proper score of its confidence (``objectives``).
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import FREE, Attempt, Outcome
from megatron_dcpo.judging.verifier_kind import Problems, VerifierKind

HAPPENED = 0.5  # from here on an outcome between 0 and 1 counts as a yes in accuracy and metrics


def verify(attempts: Sequence[Attempt]) -> list[Outcome]:
    """Return what happened, for every response. An outcome between 0 and 1 is the reward's target
    itself.
    """
    outcomes = []
    for attempt in attempts:
        share = float(attempt.truth)
        whole = share in (0.0, 1.0)
        outcomes.append(
            Outcome(
                correct=share >= HAPPENED,
                score=None if whole else share,
                logged={"score": share},
            )
        )
    return outcomes


def _check_problems(name: str, problems: Problems, source: str) -> None:
    """Raise :class:`UserError` for the first problem that has no outcome."""
    for problem in problems:
        if problem.form != "forecast":
            raise UserError(
                f"{source}: {problem.prompt_id}: judging.verifier={name} needs an outcome, true or "
                "false or a number from 0 to 1 (data.columns={outcome: NAME})"
            )


FORECAST = VerifierKind(
    form=FREE,
    build=lambda name, options, tests: verify,
    check_problems=_check_problems,
)
