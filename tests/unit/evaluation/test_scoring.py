"""Samples to evaluation.json: separable from sampling, equal when repeated, strict JSON, three
kinds of confidence.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.calibration import metrics, summarize
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.headline import HEADLINE
from megatron_dcpo.evaluation.samples import (
    geometric_mean_probability,
    read_samples,
    with_consistency,
    write_samples,
)
from megatron_dcpo.evaluation.scoring import (
    CONFIDENCE_KINDS,
    bins_from_json,
    headline,
    parse_kinds,
    score_samples,
)
from tests.helpers.evaluated import changed, make_sample, make_samples, rows_of


def test_scores_are_those_of_summarize() -> None:
    samples = make_samples()
    scores = score_samples(samples, model="m", resamples=50)
    toy = scores["benchmarks"]["toy"]
    verbal = summarize(
        [s.judgement.confidence for s in samples],
        [s.correct for s in samples],
        statuses=[s.judgement.status for s in samples],
    )
    for key in ("ece", "pce", "brier", "auroc", "parse_rate", "violation_rate", "nll"):
        assert toy["verbal"][key] == verbal[key]
    assert toy["verbal"]["mean"] == verbal["mean_confidence"]
    assert toy["accuracy"] == verbal["accuracy"]
    assert (toy["n"], toy["problems"], toy["repeats"]) == (120, 30, 4)
    assert toy["token"]["ece"] == metrics.ece(
        [s.measures.token_confidence for s in samples], [s.correct for s in samples]
    )
    assert toy["token"]["parse_rate"] == 1.0
    assert scores["overall"] == {**toy, "macro": scores["overall"]["macro"]}
    assert scores["model"] == "m"


@pytest.mark.parametrize(
    ("probability", "length", "product"), [(0.5, 3, 0.125), (0.5, 0, None), (None, 3, None)]
)
def test_a_product_of_unknown_length_is_unknown(
    probability: float | None, length: int, product: float | None
) -> None:
    """Rows of another tool's log have no length; a product of none would be 1."""
    sample = make_sample(token_confidence=probability, length=length)
    assert CONFIDENCE_KINDS["token_product"](sample) == product


def test_runs_are_the_repeats() -> None:
    """Pooled value and mean with standard deviation over the repeats, both reported."""
    samples = make_samples()
    toy = score_samples(samples, ["verbal"], resamples=0)["benchmarks"]["toy"]
    accuracies = [
        np.mean([s.correct for s in samples if s.response.sample_index == r]) for r in range(4)
    ]
    assert toy["runs"]["mean"] == pytest.approx(toy["accuracy"])
    assert toy["runs"]["sd"] == pytest.approx(np.std(accuracies, ddof=1))
    assert (
        toy["verbal"]["runs"]["ece"]["mean"] >= toy["verbal"]["ece"] - 1e-12
    )  # the triangle inequality
    assert "ci95" not in toy


def test_overall_pools_and_macro_averages() -> None:
    one, two = (make_samples(10, benchmark="one"), make_samples(40, benchmark="two", seed=1))
    scores = score_samples(one + two, ["verbal"], resamples=0)
    a, b = scores["benchmarks"]["one"], scores["benchmarks"]["two"]
    assert scores["overall"]["accuracy"] == pytest.approx(
        (10 * a["accuracy"] + 40 * b["accuracy"]) / 50
    )
    assert scores["overall"]["macro"]["accuracy"] == pytest.approx(
        (a["accuracy"] + b["accuracy"]) / 2
    )
    assert scores["overall"]["macro"]["verbal"]["ece"] == pytest.approx(
        (a["verbal"]["ece"] + b["verbal"]["ece"]) / 2
    )


def test_rescoring_a_file_gives_the_same_evaluation(tmp_path: Path) -> None:
    samples = make_samples()
    write_samples(samples, tmp_path / "samples.jsonl")
    again = read_samples(tmp_path / "samples.jsonl")
    assert rows_of(again) == rows_of(samples)
    assert score_samples(again, resamples=30) == score_samples(samples, resamples=30)


def test_evaluation_is_strict_json_even_when_undefined() -> None:
    samples = [
        changed(s, correct=1.0, confidence=None, status="missing") for s in make_samples(3, 1)
    ]
    scores = score_samples(samples, resamples=10)
    json.dumps(scores, allow_nan=False)
    assert scores["overall"]["verbal"]["ece"] is None
    assert scores["overall"]["token"]["auroc"] is None
    assert scores["overall"]["runs"]["sd"] is None


def test_bins_survive_json() -> None:
    samples = make_samples()
    bins = bins_from_json(
        score_samples(samples, ["verbal"], resamples=0)["overall"]["verbal"]["bins"]
    )
    expected = metrics.bin_rows(
        [s.judgement.confidence for s in samples], [s.correct for s in samples]
    )
    for name in ("edges", "count", "confidence_sum", "correct_sum"):
        assert np.array_equal(getattr(bins, name), getattr(expected, name))


def test_the_headline_is_the_first_kind_of_confidence() -> None:
    scores = score_samples(make_samples(), resamples=0)
    line = headline(scores)
    assert tuple(line) == HEADLINE
    assert line["mean_confidence"] == scores["overall"]["verbal"]["mean"]
    assert headline(scores, "token", "toy")["ece"] == scores["benchmarks"]["toy"]["token"]["ece"]


def test_consistency_counts_equivalent_answers() -> None:
    base = make_samples(1, 4)[0]
    answers = ["1/2", "0.5", "3", None]
    samples = [changed(base, sample_index=i, answer=answer) for i, answer in enumerate(answers)]
    asked = []

    def equivalent(a: str, b: str) -> bool:
        asked.append((a, b))
        return {a, b} == {"1/2", "0.5"}

    found = with_consistency(samples, equivalent)
    assert [s.measures.consistency_confidence for s in found] == [0.5, 0.5, 0.25, None]
    assert asked == [("0.5", "1/2"), ("3", "1/2")]
    other = changed(samples[0], prompt_id="toy/other")
    assert (
        with_consistency([*samples, other], equivalent)[-1].measures.consistency_confidence == 1.0
    )


def test_token_confidence_is_the_geometric_mean() -> None:
    assert geometric_mean_probability([math.log(0.5), math.log(0.125)]) == pytest.approx(0.25)
    assert geometric_mean_probability([]) is None
    assert geometric_mean_probability([1e-9]) == 1.0  # rounding above zero must not leave [0, 1]


def test_samples_that_cannot_be_scored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="unknown confidence 'vocal'; known: verbal, token, token_product, "
    ):
        parse_kinds("verbal,vocal")
    assert parse_kinds("token, verbal,token") == ("token", "verbal")
    (tmp_path / "s.jsonl").write_text('{"benchmark": "a"}\n')
    with pytest.raises(UserError, match=r"s\.jsonl:1: not a sample"):
        read_samples(tmp_path / "s.jsonl")
    with pytest.raises(UserError, match="no such file"):
        read_samples(tmp_path / "none.jsonl")


@pytest.mark.parametrize("right", [True, False])
def test_three_problems_of_three_leave_an_interval(right: bool) -> None:
    """Wilson's: [n / (n + z^2), 1] of n right problems, and its mirror image."""
    samples = [changed(sample, correct=right) for sample in make_samples(3, 2)]
    scores = score_samples(samples, resamples=50)["overall"]
    bound = 3 / (3 + 1.959964**2)
    expected = [bound, 1.0] if right else [0.0, 1 - bound]
    assert scores["ci95"]["accuracy"] == pytest.approx(expected, abs=1e-6)
    assert scores["ci95"]["pass_at_k"]["1"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("numbers", "said"), [((0.8,) * 6, True), ((0.8, 0.7) * 3, False)])
def test_one_number_for_every_answer_is_said(
    numbers: tuple[float, ...], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [
        changed(sample, confidence=number)
        for sample, number in zip(make_samples(3, 2), numbers, strict=True)
    ]
    score_samples(samples, resamples=0)
    assert ("0.8" in caplog.text) is said


def test_a_problem_that_was_trained_on_in_two_epochs_is_one(tmp_path: Path) -> None:
    """Of a user's own ids nothing is taken off."""
    trained = []
    for epoch in range(3):
        for problem in range(4):
            sample = make_sample(
                prompt_id=f"toy/{problem}@1@{epoch}",
                sample_index=0,
                correct=float(problem % 2),
                training_step=epoch + 1,
            )
            trained.append(sample)
    write_samples(trained, tmp_path / "samples.jsonl")
    read = read_samples(tmp_path / "samples.jsonl")
    assert {sample.problem_key[1] for sample in read} == {f"toy/{n}@1" for n in range(4)}
    assert score_samples(read, ["verbal"], resamples=0)["overall"]["problems"] == 4
    evaluated = [changed(sample, training_step=None) for sample in read]
    assert {sample.problem_key[1] for sample in evaluated} == {
        sample.prompt.prompt_id for sample in trained
    }
    assert score_samples(evaluated, ["verbal"], resamples=0)["overall"]["problems"] == 12


def test_repeats_that_some_problems_have_not_are_not_compared() -> None:
    """Pooled over a benchmark of two repeats and one of eight there are none to compare."""
    two, eight = make_samples(10, 2, "two"), make_samples(4, 8, "eight", seed=1)
    scores = score_samples(two + eight, ["verbal"], resamples=0)
    assert scores["overall"]["runs"] == {"mean": None, "sd": None}
    assert scores["overall"]["verbal"]["runs"]["ece"] == {"mean": None, "sd": None}
    for name in ("two", "eight"):
        scored = scores["benchmarks"][name]
        assert scored["runs"]["mean"] == pytest.approx(scored["accuracy"])
    unfinished = score_samples(two[:-1], ["verbal"], resamples=0)["overall"]
    assert unfinished["runs"] == {"mean": None, "sd": None}


@pytest.mark.parametrize("problems", [1, 4])
def test_problems_that_do_not_differ_have_no_interval(problems: int) -> None:
    """Each is right once and wrong once with the same confidences."""
    samples = []
    for problem in range(problems):
        for repeat in range(2):
            sample = make_sample(
                prompt_id=f"toy/{problem}",
                sample_index=repeat,
                correct=float(repeat),
                confidence=0.4 + repeat / 5,
                status="ok",
            )
            samples.append(sample)
    ci95 = score_samples(samples, ["verbal"], resamples=50)["overall"]["ci95"]
    assert ci95["accuracy"] == [None, None]
    assert "1" not in ci95["pass_at_k"]
    for name in ("ece", "pce", "brier", "auroc"):
        assert ci95["verbal"][name] == [None, None]
