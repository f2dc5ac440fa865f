"""What a confidence is for: the conformal guarantee by simulation, votes and routing against sums by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_dcpo.calibration.use import abstention, conformal_threshold, routing, use_summary, votes


def world(generator: np.random.Generator, problems: int, repeats: int = 3) -> tuple[np.ndarray, ...]:
    """Over-confident: right with c squared; repeats of a problem share their confidence. (index, c, y)."""
    c = np.repeat(np.round(generator.random(problems), 2), repeats)
    y = (generator.random(len(c)) < c**2).astype(float)
    return np.repeat(np.arange(problems), repeats), c, y


@pytest.mark.parametrize("target", [0.05, 0.2])
def test_abstention_keeps_its_promise_on_new_problems_whatever_the_confidence_is_worth(target: float) -> None:
    """The guarantee is of the mean over calibration sets: E (1 - c^2) over c >= t is at most the target, and near it."""
    generator = np.random.default_rng(3)
    grid = np.round(np.arange(0, 1.005, 0.01), 2)
    share = np.where((grid == 0) | (grid == 1), 0.005, 0.01)
    risk = []
    for _ in range(400):
        threshold = conformal_threshold(*world(generator, 60), target)
        risk.append(float((share * (1 - grid**2))[grid >= threshold].sum()))
    margin = 3 * np.std(risk) / math.sqrt(len(risk))
    assert np.mean(risk) <= target + margin
    assert np.mean(risk) >= target - 2.5 / 61 - margin, "a threshold that answers nothing would keep it too"


def test_the_threshold_is_the_least_that_is_allowed() -> None:
    """20 problems, one sample each, wrong where c < 0.5: (losses + 1) / 21 <= 0.15 allows two wrong answers."""
    c = np.arange(20) / 20
    y = (c >= 0.5).astype(float)
    assert conformal_threshold(np.arange(20), c, y, 0.15) == pytest.approx(0.4)
    assert conformal_threshold(np.arange(20), c, y, 0.04) == math.inf, "1/21 is more than the target"
    tied = np.where(c < 0.5, 0.1, 0.9)
    assert conformal_threshold(np.arange(20), tied, y, 0.15) == 0.9, (
        "samples of equal confidence stand and fall together"
    )


def test_abstention_reports_the_half_that_chose_nothing() -> None:
    index, c, y = world(np.random.default_rng(0), 4000)
    found = abstention(index, c, y, 0.1)
    assert found["error"] == pytest.approx(0.1, abs=0.02)
    assert found["coverage"] == pytest.approx(1 - found["threshold"], abs=0.03)
    assert found["error_answered"] == pytest.approx(found["error"] / found["coverage"])
    assert math.isnan(abstention(np.zeros(3, int), c[:3], y[:3], 0.1)["error"])


def test_votes_by_hand() -> None:
    """One problem where two agree on the wrong 7 and one is sure of the right 8; one where two answers tie."""
    index = np.array([0, 0, 0, 1, 1, 1])
    c, y = np.array([0.2, 0.3, 0.9, 0.5, 0.5, -1.0]), np.array([0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    found = votes(index, c, y, ["7", "7", "8", "a", "b", None])
    assert found == pytest.approx({"single": 1 / 3, "majority": 0.25, "weighted": 0.75, "best_of_n": 0.75})


def test_routing_by_hand() -> None:
    """The less confident half goes to a model that is always right; without a confidence goes first."""
    c, y = np.array([0.9, 0.1, np.nan, 0.8]), np.array([1.0, 0.0, 0.0, 0.0])
    found = routing(["a", "b", "c", "d"], c, y, dict.fromkeys("abcd", 1.0), 10.0)
    half = next(row for row in found if row["share"] == 0.5)
    assert half == pytest.approx({"share": 0.5, "accuracy": 0.75, "random": 0.625, "cost": 6.0})
    assert [row["accuracy"] for row in found if row["share"] in (0.0, 1.0)] == [0.25, 1.0]
    tied = routing(["a", "b"], np.array([0.5, 0.5]), np.array([0.0, 1.0]), {"a": 1.0, "b": 1.0}, 1.0)
    assert tied[4]["accuracy"] == pytest.approx(0.75), "equal confidences: in proportion"
    assert routing(["a"], c[:1], y[:1], {}, 1.0) == []


def test_the_summary_takes_any_labels_and_missing_confidences() -> None:
    found = use_summary(
        ["x", "x", "y", "y"], np.array([0.5, np.nan, 0.2, 0.4]), np.array([1.0, 0, 0, 0]), ["1", "2", "3", "3"]
    )
    assert [row["target"] for row in found["abstention"]] == [0.01, 0.05, 0.1]
    assert found["votes"]["weighted"] == 0.5
