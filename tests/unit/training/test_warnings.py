"""Each watcher warns where its cause is, once, and is silent on healthy runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.runtime.run_records import read_warnings
from megatron_dcpo.training.warnings import (
    WATCHERS,
    new_warnings,
    too_few,
    warnings_of_the_start,
)


def healthy(step: int) -> dict[str, Any]:
    """A record as a run that learns has it, some numbers undefined now and then."""
    return {
        "step": step,
        "reward/accuracy": min(0.2 + 0.01 * step, 0.99),
        "format/violation_rate": 0.05 if step % 3 else 0.0,
        "grad_norm/total": 0.5 + 0.4 * (step % 2),
        "engine/kl": math.nan if step == 7 else 1e-6,
        "length/truncated": 0.1,
        "entropy": 0.8 / (1 + step / 20),
        "confidence/std": 0.1,
        "confidence/extremes": 0.5,
        "answer/most_frequent": 0.2,
        "answer/most_frequent/sums": 0.3,
    }


HOPELESS: dict[str, dict[str, Any]] = {
    "all_malformed": {"format/violation_rate": 1.0},
    "no_gradient": {"grad_norm/total": 0.0},
    "accuracy_zero": {"reward/accuracy": 0.0},
    "accuracy_one": {"reward/accuracy": 1.0},
    "exploding": {"grad_norm/total": 1e4},
    "mismatch_growing": {"engine/kl": 0.05},
    "at_the_limit": {"length/truncated": 0.7},
    "entropy_collapsed": {"entropy": 1e-3},
    "confidence_constant": {"confidence/std": 0.015},
    "confidence_is_a_bit": {"confidence/extremes": 0.95},
    "one_answer": {"answer/most_frequent/sums": 0.6},
}


def test_every_watcher_has_a_case() -> None:
    assert set(HOPELESS) == {watcher.__name__ for watcher in WATCHERS}


class Watched:
    """A run's records, as the recorder keeps them."""

    def __init__(self, directory: Path, rows: list[dict[str, Any]]) -> None:
        self.directory, self.rows = directory, list(rows)

    def after(self, row: dict[str, Any]) -> list[str]:
        self.rows.append(row)
        return new_warnings(self.directory, self.rows)


@pytest.mark.parametrize("name", HOPELESS)
def test_a_cause_is_said_once_with_what_to_try(name: str, tmp_path: Path) -> None:
    watching = Watched(tmp_path, [])
    said = [text for step in range(1, 41) for text in watching.after(healthy(step))]
    assert said == []
    said = [
        text for step in range(41, 81) for text in watching.after(healthy(step) | HOPELESS[name])
    ]
    (text,) = said
    (written,) = read_warnings(tmp_path)
    assert written["watcher"] == name
    assert written["text"] == text
    assert ":" in text or "," in text  # what is seen, and what to try
    again = Watched(tmp_path, watching.rows)  # a resumed run
    assert again.after(healthy(81) | HOPELESS[name]) == []


def test_a_policy_that_was_destroyed_is_told_from_one_that_never_spoke(tmp_path: Path) -> None:
    silent = {"step": 1, "format/violation_rate": 1.0}
    (said,) = (
        text for step in range(1, 9) for text in Watched(tmp_path, [silent] * 5).after(silent)
    )
    assert "warm start" in said
    (tmp_path / "warnings.jsonl").unlink()
    watching = Watched(tmp_path, [healthy(1)])
    (said,) = (text for _ in range(6) for text in watching.after(silent))
    assert "lower optimizer.lr" in said


def test_one_good_step_ends_a_row(tmp_path: Path) -> None:
    watching = Watched(tmp_path, [])
    for step in range(1, 60):
        bad = {} if step % 4 == 0 else {"format/violation_rate": 1.0, "grad_norm/total": 0.0}
        assert watching.after(healthy(step) | bad) == []


def test_undefined_metrics_warn_of_nothing(tmp_path: Path) -> None:
    watching = Watched(tmp_path, [])
    for step in range(1, 60):
        assert (
            watching.after({"step": step, **dict.fromkeys(healthy(1).keys() - {"step"}, math.nan)})
            == []
        )


def test_a_damaged_file_of_warnings_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "warnings.jsonl").write_text(
        '{"step": 1, "watcher": "exploding", "text": "t"}\n{"step": 2, "wat'
    )
    assert [warning["watcher"] for warning in read_warnings(tmp_path)] == ["exploding"]


def test_problems_fewer_than_a_step_needs() -> None:
    assert too_few(8, "problems", "data.prompts_per_step", 8) is None
    warning = str(too_few(3, "problems", "data.prompts_per_step", 8))
    assert "3 problems are fewer than data.prompts_per_step=8" in warning


# ------------------------------------------------------------------- before the first step


@pytest.mark.parametrize(
    ("objective", "warns"),
    [
        ({"name": "dcpo"}, True),
        ({"name": "dcpo", "preset": "verl_compat"}, True),
        ({"name": "dcpo", "preset": "dcpo_proper"}, False),
        ({"name": "dcpo", "advantage_normalization_confidence": "mean"}, False),
        ({"name": "grpo"}, False),
        ({"name": "rlcr"}, True),
        ({"name": "rlcr", "advantage_normalization_reasoning": "mean"}, False),
    ],
)
def test_a_group_std_of_the_confidence_is_said_at_the_start(
    objective: dict[str, Any], warns: bool, tmp_path: Path
) -> None:
    """Also by a resumed run, but it is in the file once."""
    config = ObjectiveConfig(**objective)
    for _ in range(2):
        texts = warnings_of_the_start(tmp_path, config)
        assert len(texts) == int(warns)
    written = read_warnings(tmp_path)
    assert [each["watcher"] for each in written] == ["drift_of_the_confidence"] * warns
    option = "advantage_normalization_confidence"
    if objective["name"] == "rlcr":  # one advantage for the whole response
        option = "advantage_normalization_reasoning"
    assert all(option in each["text"] for each in written)
