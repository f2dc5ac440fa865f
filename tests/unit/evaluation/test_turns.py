"""Confidences of earlier turns in an evaluation, its report and the metrics of a validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dcpo.evaluation import report
from megatron_dcpo.evaluation.card import _results
from megatron_dcpo.evaluation.fitting import PosthocFit, fit_on_files
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc, fit, is_held_out, problem_of
from megatron_dcpo.evaluation.runs import find_runs
from megatron_dcpo.evaluation.samples import Sample, at_each_turn, write_samples
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


def sessions(count: int) -> list[Sample]:
    """Of one, two or three answers: the first number knows nothing, the second all, the last that
    the answer is wrong if it is high.
    """
    samples = []
    for number, sample in enumerate(make_samples(count)):
        right = number % 2
        turns = ((1, 0.5), (2, 0.9 if right else 0.1))[: number % 5]
        response = replace(
            sample.response, turn_confidences=turns, counted={"turns": 1.0 + len(turns)}
        )
        judged = replace(
            sample.judgement,
            correct=float(right),
            confidence=0.1 if right else 0.9,
            status="ok",
        )
        samples.append(replace(sample, response=response, judgement=judged))
    return samples


def test_every_number_of_a_session_is_a_row() -> None:
    samples = sessions(5)
    rows = at_each_turn(samples)
    assert [
        (row.turn, row.judgement.confidence) for row in rows if row.name == samples[3].name
    ] == [
        (1, 0.5),
        (2, 0.9),
        (3, 0.1),
    ]
    for row in rows:
        (session,) = [one for one in samples if one.name == row.name]
        assert (row.correct, row.problem_key) == (session.correct, session.problem_key)
        assert row.response.turn_confidences == ()
    malformed = samples[3].at_turn(2, None)
    assert malformed.judgement.status == "unparsable"


def test_a_curve_for_each_turn(tmp_path: Path) -> None:
    samples = sessions(400)
    write_samples(samples, tmp_path / "samples.jsonl")
    fit_on_files([str(tmp_path / "samples.jsonl")], str(tmp_path / "c.npz"), PosthocFit())
    predictor = Posthoc.load(tmp_path / "c.npz")
    assert (predictor.source, predictor.weights["tasks"].tolist()) == ("turns", ["1", "2", "3"])
    rows = [samples[0].at_turn(turn, stated) for turn in (2, 3, 7) for stated in (0.1, 0.9)]
    low_2, high_2, low_3, high_3, low_7, high_7 = map(float, predictor.predict(rows))  # type: ignore[arg-type]
    assert high_2 > 0.7 > 0.3 > low_2
    assert low_3 > 0.7 > 0.3 > high_3, "another turn, another meaning"
    assert (low_7, high_7) == (low_3, high_3), "later turns share the last curve"
    assert predictor.record is not None
    outside = [row for row in at_each_turn(samples) if is_held_out(problem_of(row), 0.2, 0)]
    assert len(predictor.record.held_out_correct) == len(outside)
    assert predictor.record.held_out_problems is not None
    assert len(set(predictor.record.held_out_problems)) == len({problem_of(one) for one in outside})


def test_few_numbers_have_no_curve() -> None:
    rows = at_each_turn(sessions(60))
    few = [row for number, row in enumerate(rows) if row.turn < 3 or number < 20]
    predictor, _ = fit("logistic", few, "turns", held_out=0.0)
    assert predictor.weights["tasks"].tolist() == ["1", "2"]


def with_logprobs(sample: Sample) -> Sample:
    known = replace(sample, judgement=replace(sample.judgement, boundary=4))
    return known.measured(reasoning_logprob=-2.0)


def test_other_samples_and_methods_are_fitted_as_ever(tmp_path: Path) -> None:
    file, out = str(tmp_path / "samples.jsonl"), str(tmp_path / "c.npz")
    write_samples(map(with_logprobs, make_samples(80)), file)
    fit_on_files([file], out, PosthocFit())
    assert Posthoc.load(out).source == "response"
    write_samples(map(with_logprobs, sessions(80)), file)
    for options in (
        PosthocFit(source="response"),
        PosthocFit(method="platt", source="verbal"),
    ):
        fit_on_files([file], out, options)
        assert Posthoc.load(out).source == options.source
