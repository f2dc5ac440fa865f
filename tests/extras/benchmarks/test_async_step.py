"""What the benchmark of ``rollout.max_staleness`` says of the steps that it has timed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import REPOSITORY

sys.path.insert(0, str(Path(REPOSITORY) / "benchmarks"))
import async_step


def step(wall: float, rollout: float) -> dict[str, Any]:
    return {
        "wall": wall,
        "rollout": rollout,
        "train": wall - rollout,
        "trainer_waits": 0.1,
        "engine_waits": 0.1,
        "prompts": ["p"],
        "lengths": [10],
    }


@pytest.mark.parametrize(
    ("rollout", "beside", "met"),
    [(13.0, 13.6, True), (13.0, 13.7, False), (12.0, 13.6, True), (12.0, 13.7, False)],
)
def test_the_goal_is_a_step_over_its_bound(rollout: float, beside: float, met: bool) -> None:
    """Of 25 s one after the other, whichever half is the longer one."""
    steps = async_step.WARM_UP + async_step.STEPS
    rows = {
        "beside": [step(beside, rollout) for _ in range(steps)],
        "after": [step(25.0, rollout) for _ in range(steps)],
    }
    first, whole, *_ = async_step.compared(rows)
    assert (first.ours, first.other, first.goal) == (beside, 13.0, 1.05)
    assert first.met is met
    assert whole.ratio == beside / 25
    assert (whole.bound, whole.goal) == (13 / 25, None)
