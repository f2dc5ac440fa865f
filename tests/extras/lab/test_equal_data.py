"""Trainings compared at equal informative groups and at equal responses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lab.equal_data import at_equal_data
from megatron_dcpo.evaluation.runs import EvaluatedRun


def trained(name: str, rows: list[dict[str, Any]]) -> EvaluatedRun:
    return EvaluatedRun(name=name, path=Path(name), evaluation=None, metrics=rows, samples=[])


def rows(steps: int, groups: int, responses: int, **more: float) -> list[dict[str, Any]]:
    """Records of a run whose accuracy rises by .01 a step."""
    return [
        {
            "step": step,
            "rollout/informative_groups_total": groups * step,
            "rollout/responses_total": responses * step,
            "reward/accuracy": step / 100,
            **more,
        }
        for step in range(1, steps + 1)
    ]


def test_runs_are_read_where_they_have_seen_as_much() -> None:
    fast = trained("grpo", rows(40, groups=20, responses=200))
    slow = trained("dcpo", rows(40, groups=10, responses=80))
    groups, responses = at_equal_data([fast, slow])
    assert (groups.what, groups.amount) == ("informative groups", 400)
    assert groups.rows["grpo"]["step"] == 20
    assert groups.rows["dcpo"]["step"] == 40
    # the mean of the ten steps up to there
    assert groups.rows["grpo"]["accuracy"] == pytest.approx(0.155)
    assert groups.rows["dcpo"]["accuracy"] == pytest.approx(0.355)
    assert groups.rows["grpo"]["responses"] == 4000
    assert (responses.what, responses.amount) == ("responses", 3200)
    assert responses.rows["grpo"]["step"] == 16


def test_the_accuracy_is_that_of_all_that_was_sampled() -> None:
    """A filter that drops groups leaves those that are neither all right nor all wrong."""
    filtered = trained("any", rows(10, 5, 90, **{"rollout/accuracy": 0.25}))
    equal = at_equal_data([filtered, trained("none", rows(10, 5, 90))])
    assert equal[0].rows["any"]["accuracy"] == 0.25


def test_calibration_is_of_all_that_was_sampled_or_not_there() -> None:
    """Where groups were left out in the averaged steps, it is that of the others alone."""
    measured = {"calibration/ece": 0.2, "rollout/groups_filtered": 0}
    filtered = rows(30, 5, 90, **measured)
    filtered[25]["rollout/groups_filtered"] = 3
    earlier = rows(30, 5, 90, **measured)
    earlier[3]["rollout/groups_filtered"] = 3
    groups, _ = at_equal_data([trained("filtered", filtered), trained("earlier", earlier)])
    assert groups.rows["filtered"]["ece"] is None
    assert groups.rows["filtered"]["accuracy"] is not None
    assert groups.rows["earlier"]["ece"] == pytest.approx(0.2)


def test_a_run_that_began_beyond_the_amount_has_no_values() -> None:
    small = trained("small", rows(1, groups=10, responses=80))
    large = trained("large", rows(4, groups=10, responses=1024))
    _, responses = at_equal_data([small, large])
    assert responses.amount == 80
    assert responses.rows["small"]["responses"] == 80
    assert set(responses.rows["large"].values()) == {None}


def test_runs_that_did_not_count_have_no_part() -> None:
    old = trained("old", [{"step": 1, "reward/accuracy": 0.5}])
    resumed = trained("resumed", rows(3, 5, 90))
    for row in resumed.metrics:
        row["rollout/informative_groups_total"] = math.nan  # type: ignore[index]
    assert at_equal_data([old, trained("new", rows(3, 5, 90))]) == []
    counted = at_equal_data([resumed, trained("new", rows(3, 5, 90)), old])
    assert [equal.what for equal in counted] == ["responses"]
    assert set(counted[0].rows) == {"resumed", "new"}
