"""Trainings compared at equal data: when each run had seen as many informative groups, or sampled
as many responses, as the run that has the fewest.

Runs of equal length in steps need not have learned from the same amount of data: a filter of groups
draws more for one method than for another (docs/algorithms.md#groups-without-a-signal).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.calibration.summary import OF_CONFIDENCE
from megatron_dcpo.evaluation.headline import is_number
from megatron_dcpo.evaluation.runs import EvaluatedRun

STEPS = 10  # over which a value is averaged, up to the step of equal data
TOTALS = {
    "informative groups": "rollout/informative_groups_total",
    "responses": "rollout/responses_total",
}
# a metric of a step, or the first of several that it has
VALUES = {
    "accuracy": ("rollout/accuracy", "reward/accuracy"),
    **{name: (f"calibration/{name}",) for name in OF_CONFIDENCE},
}
# groups that were sampled and not trained: the calibration is of the trained ones, not of all
FILTERED = "rollout/groups_filtered"


@dataclass(frozen=True)
class EqualData:
    """Runs after equal ``amounts`` of ``what`` (a key of :data:`TOTALS`).

    ``rows`` has for each run its ``step``, the totals up to it, and the means of :data:`VALUES`
    over the last steps. A value is None if it is undefined; so are all of a run whose first step
    had gone beyond the amount, and the calibration of a run that left groups out of these steps.
    """

    what: str
    amount: int
    rows: Mapping[str, Mapping[str, float | None]]


def at_equal_data(runs: Sequence[EvaluatedRun]) -> list[EqualData]:
    """Return the comparisons that two or more of the runs can have part in."""
    comparisons = []
    for what, total in TOTALS.items():
        counted = {}
        for run in runs:
            rows = [row for row in run.metrics if is_number(row.get(total))]
            if rows:
                counted[run.name] = rows
        if len(counted) < 2:
            continue
        amount = min(rows[-1][total] for rows in counted.values())
        table = {
            name: _values([row for row in rows if row[total] <= amount])
            for name, rows in counted.items()
        }
        comparisons.append(EqualData(what=what, amount=int(amount), rows=table))
    return comparisons


def _values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return a run's values after the last of ``rows``; None each without rows."""
    last: Mapping[str, Any] = rows[-1] if rows else {}
    values: dict[str, float | None] = {"step": last.get("step")}
    for what, total in TOTALS.items():
        values[what] = last.get(total)
    averaged = rows[-STEPS:]
    filtered = any(_is_filtered(row) for row in averaged)
    for name, metrics in VALUES.items():
        if filtered and name in OF_CONFIDENCE:
            values[name] = None
            continue
        defined = []
        for row in averaged:
            candidates = [row[metric] for metric in metrics if metric in row]
            if candidates and is_number(candidates[0]):
                defined.append(float(candidates[0]))
        values[name] = sum(defined) / len(defined) if defined else None
    return values


def _is_filtered(row: Mapping[str, Any]) -> bool:
    """Return whether a step left sampled groups out of its batch."""
    count = row.get(FILTERED)
    return is_number(count) and count > 0
