"""The dictionary that training and evaluation share."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from megatron_dcpo.calibration import Bootstrap, json_ready, summarize, violation_rates
from megatron_dcpo.types import MALFORMED


def test_unparsed_answers_count_for_accuracy_but_not_for_calibration() -> None:
    s = summarize([0.9, None, 0.2, float("nan")], [1, 1, 0, 0])
    assert (s["n"], s["n_parsed"], s["accuracy"], s["accuracy_parsed"]) == (4, 2, 0.5, 0.5)
    assert s["parse_rate"] == 0.5
    assert s["violation_rate"] == 0.5
    assert s["ece"] == pytest.approx((0.1 + 0.2) / 2)
    assert s["pce"] == pytest.approx(0.1)
    assert s["brier"] == pytest.approx((0.01 + 0.04) / 2)
    assert s["brier_worst"] == pytest.approx((0.01 + 0.04 + 2) / 4)
    assert s["auroc"] == 1.0
    assert s["mean_confidence"] == pytest.approx(0.55)
    assert s["overconfidence"] == pytest.approx(0.05)


def test_statuses_give_every_kind_of_violation() -> None:
    rates = violation_rates(["ok", "missing", "truncated", "ok"])
    assert rates["violation_rate"] == 0.5
    assert set(rates["violations"]) == set(MALFORMED)
    assert rates["violations"]["missing"] == 0.25
    assert rates["violations"]["multiple"] == 0.0
    s = summarize(
        [0.5, None, None, 1.0], [1, 0, 0, 1], statuses=["ok", "missing", "truncated", "ok"]
    )
    assert s["violation_rate"] == 0.5


def test_empty_and_all_malformed() -> None:
    s = summarize([], [], statuses=[])
    assert s["n"] == 0
    assert all(
        math.isnan(s[k])
        for k in ("accuracy", "ece", "pce", "auroc", "mean_confidence", "violation_rate")
    )
    s = summarize([None, None], [1, 0])
    assert s["accuracy"] == 0.5
    assert s["violation_rate"] == 1.0
    assert math.isnan(s["ece"])
    assert s["ece_worst"] == 1.0


def test_intervals_hold_the_estimate_and_are_optional() -> None:
    generator = np.random.default_rng(0)
    c = generator.random(400)
    y = generator.random(400) < c
    ids = np.repeat(np.arange(100), 4)
    s = summarize(c, y, bootstrap=Bootstrap(ids, resamples=300))
    assert set(s["ci95"]) == {
        "accuracy",
        "ece",
        "pce",
        "brier",
        "auroc",
        "auroc_within_problem",
    }
    low, high = s["ci95"]["auroc_within_problem"]
    assert low < s["auroc_within_problem"] < high
    assert 0 < s["problems_used"] <= 100
    for name in ("accuracy", "brier", "auroc"):
        low, high = s["ci95"][name]
        assert low < s[name] < high
    assert "ci95" not in summarize(c, y)


def test_float32_confidences_from_a_tensor_give_the_same_bins() -> None:
    c = np.array([0.05, 0.15, 0.35, 0.55, 0.95, 1.0])
    y = [0, 1, 0, 1, 1, 1]
    assert summarize(c.astype(np.float32), y)["ece"] == pytest.approx(
        summarize(c, y)["ece"], abs=1e-7
    )


def test_json_ready_is_strict_json() -> None:
    value = json_ready(
        {"a": float("nan"), "b": [np.float32(1.5), np.int64(2)], "c": (float("inf"), None), 3: "x"}
    )
    assert value == {"a": None, "b": [1.5, 2], "c": [None, None], "3": "x"}
    json.dumps(value, allow_nan=False)
