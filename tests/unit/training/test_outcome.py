"""What a training says when it has ended, and how much time is left while it goes on."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.training.outcome import outcome
from megatron_dcpo.training.progress import time_left


def a_run(directory: Path, rows: list[dict[str, Any]]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_it_names_the_policy_and_what_has_changed(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/accuracy": step / 100} for step in range(1, 41)]
    rows[0] |= {"evaluation/toy/accuracy": 0.25, "evaluation/toy/ece": 0.5}
    rows[-1] |= {"evaluation/toy/accuracy": 0.75, "evaluation/toy/ece": 0.125}
    run = a_run(tmp_path / "run", rows)
    (run / "policy").mkdir()
    lines = "\n".join(outcome(run))
    assert str(run / "policy") in lines
    assert "step 40" in lines
    assert "0.055, 0.355" in lines  # of steps 1 to 10 and 31 to 40
    for number in ("0.250", "0.750", "0.500", "0.125"):
        assert number in lines
    assert f"dcpo evaluate --model {run / 'policy'}" in lines
    assert f"dcpo report {run}" in lines


def test_the_command_that_evaluates_names_the_benchmarks_of_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "my run", [{"step": 1}])
    (run / "policy").mkdir()
    config = "evaluation:\n  benchmarks: [math500, mine=held.jsonl]\n"
    (run / "config.yaml").write_text(config)
    (line,) = (line for line in outcome(run) if "dcpo evaluate" in line)
    words = shlex.split(line.partition(": ")[2])
    assert words[words.index("--benchmarks") + 1] == "math500,mine=held.jsonl"
    assert words[words.index("--model") + 1] == str(run / "policy")


def test_a_number_that_is_not_known_is_left_out(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": value} for step, value in enumerate([2.0, math.nan, 1.0], 1)]
    rows[1]["loss"] = None
    lines = outcome(a_run(tmp_path / "run", rows))
    assert any("2.000, 1.000" in line for line in lines)
    assert not any("policy" in line for line in lines)


def test_a_validation_without_a_confidence_is_shown(tmp_path: Path) -> None:
    rows = [{"step": 1, "evaluation/toy/accuracy": 0.0, "evaluation/toy/ece": None}]
    lines = "\n".join(outcome(a_run(tmp_path / "run", rows)))
    assert "0.000" in lines
    assert "nan" not in lines.lower()


def test_a_run_without_steps_says_nothing(tmp_path: Path) -> None:
    assert outcome(a_run(tmp_path / "run", [])) == []
    assert outcome(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("steps", "shown"), [(0, ""), (60, "0:02:00")])
def test_time_left_is_of_the_last_steps(steps: int, shown: str) -> None:
    rows = [{"step": step, "time/step": 2.0} for step in range(1, 10)]
    assert shown in time_left(rows, steps)
    assert bool(time_left(rows, steps)) == bool(shown)
    assert time_left([], 10) == ""
