"""The tables of the price: what is paired, and what the margin decides."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lab import price
from lab.results import interval, write_archive
from tests.helpers.paths import REPOSITORY


def responses(rng: np.random.Generator, accuracy: float) -> bytes:
    """Eight responses to each of 20 problems, stated with the confidence that they deserve."""
    lines = ["problem,correct,confidence,answer,logprob,token,tokens"]
    for problem in range(20):
        for _ in range(8):
            correct = int(rng.random() < accuracy)
            logprob = -0.1 - rng.random() - (1 - correct)
            lines.append(f"{problem},{correct},{accuracy},1,{logprob:.3f},0.5,12")
    return "\n".join(lines).encode()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    files = {}
    accuracies = {"grpo_informative": 0.6, "dcpo_proper_informative": 0.4}
    for pretraining in (1, 2, 3):
        for method, accuracy in accuracies.items():
            name = f"large.{pretraining}/{method}/1"
            cell = {"informative_groups": 100 * pretraining, "responses": 3200}
            files[f"{name}/cell.json"] = json.dumps(cell).encode()
            files[f"{name}/test.csv"] = responses(rng, accuracy)
            files[f"{name}/heldout.csv"] = responses(rng, accuracy)
    path = tmp_path / price.FIRST.records
    write_archive(path, files)
    return path


def test_a_method_is_compared_on_the_same_pretraining(archive: Path, tmp_path: Path) -> None:
    found = price.tables(archive, tmp_path)
    proper = found["dcpo_proper_informative"]
    grpo = found["grpo_informative"]
    np.testing.assert_allclose(
        proper["price"]["accuracy, points"], 100 * (np.array(proper["accuracy"]) - grpo["accuracy"])
    )
    assert -35 < np.mean(proper["price"]["accuracy, points"]) < -10
    assert proper["informative_groups"] == [100, 200, 300]
    assert found["rlcr_informative"]["pretrainings"] == []
    assert all(skill < 0 for skill in proper["skill_against_logistic"])
    tables = (tmp_path / "price_tables.md").read_text()
    assert "| 3 |" in tables
    assert "inferior" in tables


def test_the_replications_other_intervals(tmp_path: Path) -> None:
    """Problems as a second effect; a pair with fewer informative groups is left out of one; the
    first study's records are pooled, if they are there.
    """
    rng = np.random.default_rng(1)
    files = {}
    for pretraining in (7, 8, 9):
        for method, accuracy in {"grpo_refilled": 0.6, "dcpo_proper_refilled": 0.5}.items():
            name = f"large.{pretraining}/{method}/1"
            few = method == "dcpo_proper_refilled" and pretraining == 8
            cell = {"informative_groups": 90 if few else 100, "responses": 3200}
            files[f"{name}/cell.json"] = json.dumps(cell).encode()
            files[f"{name}/test.csv"] = responses(rng, accuracy)
            files[f"{name}/heldout.csv"] = responses(rng, accuracy)
    path = tmp_path / price.REPLICATION.records
    write_archive(path, files)
    found = price.tables(path, tmp_path, price.REPLICATION)
    points = found["dcpo_proper_refilled"]["price"]["accuracy, points"]
    secondary = found["secondary"]
    assert secondary["problems as a second random effect"]["points"] == pytest.approx(points)
    equal = secondary["pairs of equal informative groups"]["points"]
    assert equal == pytest.approx([points[0], points[2]])
    assert "both studies" not in secondary
    mean, low, high = secondary["problems as a second random effect"]["interval"]
    assert low < mean < high
    assert mean == pytest.approx(np.mean(points))


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1, -0.1, 0.0, 0.2], "not inferior"),
        ([-2.0, -2.1, -1.9, -2.2], "inferior"),
        ([-2.0, 1.0, 0.3, -0.9], "not decided"),
        ([0.3], "no interval"),
    ],
)
def test_the_margin_decides(differences: list[float], verdict: str) -> None:
    assert price.verdict(interval(differences)) == verdict


def test_the_published_runs_lose_less_than_half_a_point() -> None:
    """docs/lab/price.md: the preregistered comparison, and that the groups were nearly equal."""
    found = json.loads((REPOSITORY / "docs" / "lab" / "price.json").read_text())
    proper = found["dcpo_proper_informative"]
    gap = interval(proper["price"]["accuracy, points"])
    assert proper["pretrainings"] == [1, 2, 3, 4, 5]
    assert price.verdict(gap) == "not inferior"
    assert -0.5 < gap.low < 0 < gap.high
    groups = found["grpo_informative"]["informative_groups"]
    for ours, theirs in zip(proper["informative_groups"], groups, strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    # what the policy states is no match for its own log-probs, recalibrated with the task
    assert max(proper["skill_against_logistic"]) < 0


def test_the_replication_is_not_inferior_and_costs_a_quarter_of_a_point() -> None:
    """docs/lab/price_replicated.md: the primary comparison, its other intervals, equal groups."""
    found = json.loads((REPOSITORY / "docs" / "lab" / "price_replicated.json").read_text())
    proper = found["dcpo_proper_refilled"]
    gap = interval(proper["price"]["accuracy, points"])
    assert proper["pretrainings"] == list(range(7, 17))
    assert price.verdict(gap) == "not inferior"
    assert -0.5 < gap.low < gap.high < 0
    for other in found["secondary"].values():
        _, low, high = other["interval"]
        assert -0.5 < low < high < 0
    assert "pairs of equal informative groups" not in found["secondary"]
    groups = found["grpo_refilled"]["informative_groups"]
    for ours, theirs in zip(proper["informative_groups"], groups, strict=True):
        assert ours == pytest.approx(theirs, rel=0.003)
    skill = interval(proper["skill_against_lookup"])
    assert skill.low < 0 < skill.high
    assert max(proper["skill_against_logistic"]) < 0
