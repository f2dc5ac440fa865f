"""Confidences of earlier turns in an evaluation, its report and the metrics of a validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dcpo.evaluation import report
from megatron_dcpo.evaluation.card import _results
from megatron_dcpo.evaluation.runs import find_runs
from megatron_dcpo.evaluation.samples import Sample
from megatron_dcpo.evaluation.scoring import score_samples
from tests.helpers.evaluated import evaluated, make_samples


def with_turns() -> list[Sample]:
    samples = []
    for number, sample in enumerate(make_samples(12)):
        turns = ((1, 0.25 if number % 2 else None), (2, 0.75))[: 1 + number % 3 % 2]
        response = replace(
            sample.response, turn_confidences=turns, counted={"agent_calls": 1.0 + len(turns)}
        )
        samples.append(replace(sample, response=response))
    return samples


def test_scores_by_turn_and_of_stopping() -> None:
    samples = with_turns()
    scored = score_samples(samples, ["verbal"], resamples=0)
    turns = scored["overall"]["turns"]
    assert list(turns["by_turn"]) == ["1", "2"]
    first = turns["by_turn"]["1"]
    assert first["n"] == len(samples)
    assert first["violation_rate"] == pytest.approx(0.5)
    right = sum(sample.correct for sample in samples) / len(samples)
    assert first["accuracy"] == pytest.approx(right)
    assert sum(first["bins"]["count"]) == len(samples) / 2
    assert turns["by_turn"]["2"]["mean_confidence"] == pytest.approx(0.75)
    assert turns["stopping"]["accuracy"][0] == pytest.approx(right)
    assert turns["stopping"]["saved"][0] == 0
    assert turns["stopping"]["saved"] == sorted(turns["stopping"]["saved"])
    assert "turns" not in score_samples(make_samples(4), ["verbal"], resamples=0)["overall"]


@pytest.mark.draws
def test_the_report_draws_them(tmp_path: Path) -> None:
    evaluated(tmp_path / "agents", samples=with_turns())
    evaluated(tmp_path / "others")
    page = report.render_report(find_runs([tmp_path]))
    assert page.count("agents turn 1 reliability") == 1
    assert page.count("agents turn 2 reliability") == 1
    assert "others turn 1" not in page
    assert "Stopping early" in page
    (tmp_path / "agents" / "evaluation.json").unlink()
    assert "Stopping early" not in report.render_report(find_runs([tmp_path / "others"]))


def test_the_card_has_a_row_for_each_turn() -> None:
    row = {
        "evaluation/toy/accuracy": 0.5,
        "evaluation/toy/turn_2_n": 7,
        "evaluation/toy/turn_2_ece": 0.125,
        "evaluation/toy/turn_10_n": 3,
    }
    rows = _results(row)
    assert [cells[0] for cells in rows] == [
        "toy, verbal",
        "toy, after turn 2",
        "toy, after turn 10",
    ]
    assert rows[1][2] == "0.125"
    assert rows[1][-1] == "7"
