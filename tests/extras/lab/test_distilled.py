"""The cells of the distillation study: who gets a teacher, what is imitated; bias and slope."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.distilled import ARMS, RECORDS, Distillation, bias, slope, tables
from lab.fitted import Records
from lab.testgrid import Cell
from tests.helpers.paths import REPOSITORY

PUBLISHED = REPOSITORY / "docs" / "lab"


@pytest.fixture
def pupils(tmp_path, monkeypatch) -> Distillation:
    monkeypatch.setattr(Distillation, "policy", lambda self, cell: Path(cell.policy))
    return Distillation(
        tmp_path, jobs=1, teacher=tmp_path / "teacher", imitated=tmp_path / "imitated.jsonl"
    )


@pytest.mark.parametrize("arm", ARMS)
def test_the_arms_that_distill_name_the_teacher_and_no_other(pupils, arm, tmp_path) -> None:
    command = pupils.train_command(Cell("small.1", arm, 1))
    has_teacher = f"objective.teacher={tmp_path / 'teacher'}" in command
    assert has_teacher == arm.startswith("distilled")
    assert (command[0] == "sft") == (arm == "imitation")
    if arm == "imitation":
        assert f"data.path={tmp_path / 'imitated.jsonl'}" in command


def test_bias_counts_the_answers_that_state_a_confidence() -> None:
    zeros = np.zeros(3)
    stated = Records(
        problem=zeros,
        kind=np.array(["2x1"] * 3),
        correct=np.array([1.0, 0.0, 1.0]),
        confidence=np.array([0.9, 0.7, np.nan]),
        logprob=zeros,
        tokens=zeros,
    )
    assert bias(stated) == pytest.approx(0.3)


def test_a_bias_that_is_the_difference_of_the_accuracies_has_the_slope_one() -> None:
    runs = [
        {"by_type": {"2x1": (0.1, 0.15), "3x1": (0.3, 0.35)}},
        {"by_type": {"2x1": (0.0, 0.05)}},
    ]
    assert slope(runs) == pytest.approx(1.0)


def test_less_the_teachers_own_bias_the_slope_is_that_of_the_copy() -> None:
    """A pupil that states what its teacher states."""
    teacher = {"by_type": {"2x1": (0.0, 0.2), "3x1": (0.0, 0.0)}}
    runs = [{"by_type": {"2x1": (0.4, 0.6), "3x1": (0.1, 0.1)}}]
    assert slope(runs) == pytest.approx(0.5 / 0.3)
    assert slope(runs, teacher) == pytest.approx(1.0)


@pytest.mark.full
def test_the_published_tables_are_those_of_the_published_records(tmp_path: Path) -> None:
    tables(PUBLISHED / RECORDS, tmp_path)
    for name in ("distilled.json", "distilled_tables.md"):
        assert (tmp_path / name).read_bytes() == (PUBLISHED / name).read_bytes()
    assert (tmp_path / "distilled.png").stat().st_size > 10_000
