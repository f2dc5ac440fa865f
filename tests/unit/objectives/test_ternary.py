"""The ternary reward: numbers worked out by hand, and what an abstention changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.calibration import abstention_rates
from megatron_dcpo.cli import main
from megatron_dcpo.objectives.method import SCORES
from megatron_dcpo.training.step_metrics import abstention_metrics
from megatron_dcpo.types import Judgement
from tests.helpers.objective_cases import judgement, objective, samples_of

# right .75, abstained .1, wrong .65, wrong and malformed, right .55
ROWS = [(1, 0.75), (None, 0.1), (0, 0.65), (0, None), (1, 0.55)]


def judgements(rows: Any = ROWS) -> list[Judgement]:
    return [replace(judgement("p", R or 0.0, c), abstained=R is None) for R, c in rows]


def scores(rows: Any = ROWS, **options: Any) -> dict[str, Any]:
    method = objective(**{"name": "ternary"} | options)
    samples = samples_of(judgements(rows))
    scaled = method.scaled_scores(samples, method.group_scores(samples))
    return dict(zip(SCORES, scaled, strict=True))


def test_golden_numbers() -> None:
    """r = 1, 0, -1, -1, 1: mean 0, std sqrt(4/5). Answered alone: R mean 1/2, so t = 3/4 where
    right, else 1/4; R_c = 0,
    -.4, -1, -.2: mean -.4, std sqrt((.16 + 0 + .36 + .04) / 4) = sqrt(.14).
    """
    found = scores()
    assert found["R"].tolist() == [1, 0, -1, -1, 1]
    np.testing.assert_allclose(
        found["A_r"], [1.118034, 0, -1.118034, -1.118034, 1.118034], atol=2e-6
    )
    np.testing.assert_allclose(found["target"], [0.75, np.nan, 0.25, 0.25, 0.75])
    np.testing.assert_allclose(found["R_c"], [0, np.nan, -0.4, -1, -0.2], atol=1e-12)
    np.testing.assert_allclose(found["A_c"], [1.069045, 0, 0, -1.603567, 0.534522], atol=1e-5)


def test_penalty() -> None:
    """r = 1, 0, -.5, -.5, 1: mean .2, std sqrt((.64 + .04 + .49 + .49 + .64) / 5) = sqrt(.46)."""
    found = scores(abstain_penalty=0.5)
    assert found["R"].tolist() == [1, 0, -0.5, -0.5, 1]
    expected = np.array([0.8, -0.2, -0.7, -0.7, 0.8]) / np.sqrt(0.46)
    np.testing.assert_allclose(found["A_r"], expected, atol=1e-5)
    np.testing.assert_allclose(found["A_c"], scores()["A_c"], err_msg="no matter of the confidence")


@pytest.mark.parametrize("preset", ["paper", "verl_compat", "dcpo_proper"])
def test_the_confidence_is_dcpos_on_what_is_answered(preset: str) -> None:
    answered = [row for row in ROWS if row[0] is not None]
    alone = scores(answered, name="dcpo", preset=preset)
    found, keep = scores(preset=preset), [0, 2, 3, 4]
    for name in ("target", "R_c", "A_c"):
        np.testing.assert_array_equal(found[name][keep], alone[name], err_msg=name)
    assert found["A_c"][1] == 0
    assert np.isnan(found["R_c"][1])


def test_what_an_abstained_response_states_does_not_matter() -> None:
    other = [(1, 0.75), (None, None), *ROWS[2:]]
    for placement in ("confidence", "both"):
        np.testing.assert_array_equal(
            scores(other, malformed_placement=placement)["A_r"],
            scores(malformed_placement=placement)["A_r"],
        )
    np.testing.assert_array_equal(scores(other)["A_c"], scores()["A_c"])


def test_the_format_penalty_is_dcpos() -> None:
    assert scores(malformed_placement="both")["R"].tolist() == [1, 0, -1, -2, 1]


@pytest.mark.parametrize("preset", ["paper", "dcpo_proper"])
@pytest.mark.parametrize("rows", [[(None, 0.5), (None, 0.2)], [(1, 0.5), (None, 0.2), (None, 0.9)]])
def test_groups_that_hardly_answer_have_no_confidence_advantage(preset: str, rows: Any) -> None:
    found = scores(rows, preset=preset)
    assert found["A_c"].tolist() == [0.0] * len(rows)
    assert np.isfinite(found["A_r"]).all()
    assert (found["A_r"][0] > 0) == (rows[0][0] == 1)


def test_other_methods_count_an_abstention_as_wrong() -> None:
    rows = objective(name="dcpo").group_scores(samples_of(judgements()))
    plain = objective(name="dcpo").group_scores(
        samples_of([replace(j, abstained=False) for j in judgements()])
    )
    np.testing.assert_array_equal(rows, plain)


def test_the_metrics() -> None:
    """Two right, two wrong, one abstained of five."""
    samples = samples_of(judgements())
    assert abstention_metrics(samples, always=False) == {
        "abstention/rate": 0.2,
        "abstention/coverage": 0.8,
        "abstention/selective_accuracy": 0.5,
        "abstention/hallucination_rate": 0.4,
    }
    answering = samples_of(judgements([(1, 0.5), (0, 0.5)]))
    assert abstention_metrics(answering, always=False) == {}
    assert abstention_metrics(answering, always=True)["abstention/rate"] == 0
    silent = abstention_rates([0, 0], [True, True])
    assert np.isnan(silent.pop("selective_accuracy"))
    assert silent == {"rate": 1.0, "coverage": 0.0, "hallucination_rate": 0.0}


def test_dcpo_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {
        "boundary": 2,
        "length": 3,
        "old_logprobs": [-1.0] * 3,
        "logprobs": [-1.0] * 3,
    }
    responses = [
        {
            "prompt_id": "p",
            "correct": R or 0,
            "confidence": c,
            "status": "ok" if c else "missing",
            **tokens,
        }
        | ({"abstained": True} if R is None else {})
        for R, c in ROWS
    ]
    path = tmp_path / "group.json"
    path.write_text(
        json.dumps(
            {"method": "ternary", "options": {"abstain_penalty": 0.5}, "responses": responses}
        )
    )
    assert main(["objective", "--input", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["R"] == [1.0, 0.0, -0.5, -0.5, 1.0]
    assert found["R_c"][1] is None
    assert found["advantages"]["confidence"][1] == 0.0
    responses[0]["abstained"] = "yes"
    path.write_text(json.dumps({"method": "ternary", "responses": responses}))
    assert main(["objective", "--input", str(path)]) == 2
    assert "responses[0]: abstained is 'yes'" in capsys.readouterr().err
