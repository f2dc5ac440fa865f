"""Rows with an outcome: the number that is stated is the whole answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import JudgingConfig, load_config
from megatron_dcpo.data.datasets import Record, load_records
from megatron_dcpo.data.prompts import ask
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.verifiers import check_problems, verifier_for, verifiers
from megatron_dcpo.objectives import build_method
from megatron_dcpo.objectives.options import ObjectiveConfig
from megatron_dcpo.training.warnings import drift_of_the_confidence
from tests.helpers.paths import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "forecasts" / "forecast.yaml"


def records(tmp_path: Path, *outcomes: object) -> list[Record]:
    file = tmp_path / "rows.jsonl"
    rows = [{"problem": "Will it rain?", "outcome": outcome} for outcome in outcomes]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_records(str(file))


def test_outcomes_are_read_as_shares(tmp_path: Path) -> None:
    found = records(tmp_path, True, False, 0.25, "yes", "No", "0.5", 1)
    assert [float(record.answer) for record in found] == [1, 0, 0.25, 1, 0, 0.5, 1]
    assert {record.form for record in found} == {"forecast"}


@pytest.mark.parametrize("outcome", ["perhaps", 1.5, -1, "nan"])
def test_another_outcome_is_refused_with_its_row(tmp_path: Path, outcome: object) -> None:
    with pytest.raises(UserError, match="row 2"):
        records(tmp_path, True, outcome)


def test_what_has_not_happened_yet_is_left_out(tmp_path: Path) -> None:
    found = records(tmp_path, True, None, "", 0.25)
    assert [record.index for record in found] == [0, 3]


def test_a_verifier_of_the_users_may_have_other_outcomes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"problem": "Who wins?", "outcome": outcome} for outcome in ("Paris", None, 0.25)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_records(str(file), keep_columns=True)
    assert [record.form for record in found] == ["math", "math", "forecast"]
    assert [record.row and record.row["outcome"] for record in found] == ["Paris", None, 0.25]


def test_what_happened_is_no_kind_of_problem(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("problem,resolved,place\nWill it rain?,1,Rome\n")
    reading = RowOptions(columns={"outcome": "resolved"})
    (record,) = load_records(str(file), reading=reading)
    assert record.labels == {"place": "Rome"}
    file.write_text("problem,outcome,place\nWill it rain?,1,Rome\n")
    (record,) = load_records(str(file))
    assert record.labels == {"place": "Rome"}


@pytest.mark.parametrize(("verifier", "score"), [("forecast", 0.3), ("{forecast: 1}", 0.3)])
def test_a_share_is_a_score_for_weights_and_for_judge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verifier: str, score: float
) -> None:
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prediction": "perhaps", "reference": outcome} for outcome in (True, "0.3", "no")]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert main(["judge", "--pairs", str(file), "--verifier", verifier, "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["score"] for line in said] == [1, score, 0]
    file.write_text(json.dumps({"prediction": "perhaps", "reference": "soon"}) + "\n")
    assert main(["judge", "--pairs", str(file), "--verifier", verifier]) == 2


def test_a_row_with_an_answer_has_no_outcome(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"problem": "2+2=", "answer": "4", "outcome": "win"}) + "\n")
    (record,) = load_records(str(file))
    assert (record.answer, record.form) == ("4", "math")


def test_the_verdict_is_what_happened_whatever_is_said(tmp_path: Path) -> None:
    assert verifier_for("forecast", "math") == "forecast"
    verify, form = verifiers(JudgingConfig(), {})("forecast")
    said = [Attempt(None, truth, text) for truth in ("1.0", "0.0", "0.3") for text in ("", "yes")]
    outcomes = verify(said)
    assert [outcome and outcome.correct for outcome in outcomes] == [True] * 2 + [False] * 4
    assert [outcome and outcome.score for outcome in outcomes] == [None] * 4 + [0.3] * 2
    assert form.opener == ""  # nothing has to be boxed
    with pytest.raises(UserError, match=r"judging\.verifier=forecast"):
        check_problems("math", records(tmp_path, True), "rows")
    with pytest.raises(UserError, match="outcome"):
        check_problems("forecast", load_records("examples/quickstart/data/heldout.jsonl"), "rows")


def test_a_template_of_ours_fits_the_row() -> None:
    question = ({"role": "user", "content": "Will it rain?"},)
    (asked,) = ask(question, "forecast", "<conf>", "forecast")
    assert "<conf> Confidence: 0.83" in asked["content"]
    assert "boxed" not in asked["content"]
    for template, form in (("paper", "forecast"), ("grpo", "forecast"), ("forecast", "math")):
        with pytest.raises(UserError, match=f"data.template={template}"):
            ask(question, template, "<conf>", form)
    assert ask(question, "raw", "<conf>", "forecast") == question


@pytest.mark.parametrize(
    ("objective", "option"),
    [
        ("rlcr", "advantage_normalization_reasoning"),
        ("coupled", "advantage_normalization_reasoning"),
        ("dcpo", "advantage_normalization_confidence"),
    ],
)
def test_std_is_refused_with_the_template_and_warned_of_without(
    objective: str, option: str
) -> None:
    options = [f"objective.name={objective}", "objective.advantage_normalization=std"]
    with pytest.raises(UserError, match=f"objective.{option}=std"):
        load_config(EXAMPLE, [*options, "data.template=forecast"])
    proper = "objective.calibration_loss=brier"
    config = load_config(EXAMPLE, [*options, proper])
    method = build_method(config.objective)
    assert option in (drift_of_the_confidence(method.options, method.reads) or "")
    for template in ("forecast", "raw"):
        asked = f"data.template={template}"
        with pytest.raises(UserError, match=r"calibration_loss=l1"):
            load_config(EXAMPLE, [options[0], asked, "objective.calibration_loss=l1"])
    config = load_config(EXAMPLE, [options[0], "data.template=forecast", proper])
    method = build_method(config.objective)
    assert drift_of_the_confidence(method.options, method.reads) is None


@pytest.mark.parametrize("template", ["forecast", "raw"])
def test_an_objective_without_a_confidence_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"objective\.name=grpo"):
        load_config(
            EXAMPLE,
            [
                "objective.name=grpo",
                "objective.advantage_normalization=null",
                f"data.template={template}",
            ],
        )


@pytest.mark.parametrize(("how", "expected"), [("mean", -0.015), ("std", 0.40)])
def test_the_expected_advantage_of_stating_more_than_the_probability(
    how: str, expected: float
) -> None:
    """At p = .7 a group of .8 and .9: with ``std`` the worse forecast is pushed up."""
    config = ObjectiveConfig(name="rlcr", advantage_normalization=how)
    method = build_method(config)
    c = np.array([0.8, 0.9])
    advantage = 0.0
    for outcome, probability in ((1.0, 0.7), (0.0, 0.3)):
        R = np.full(2, outcome)
        _, _, _, A, _ = method.score_group(R, c, np.zeros(2), method.options)
        advantage += probability * float(A[1])
    assert advantage == pytest.approx(expected, abs=0.005)
