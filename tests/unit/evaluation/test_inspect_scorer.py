"""The metrics of Inspect's scorer, with the names of Inspect that they use in its place."""

from __future__ import annotations

import importlib
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

from megatron_dcpo.calibration import auroc_within_problem, ece


@pytest.fixture
def scorer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def to_float(value: str | float) -> float:
        return {"C": 1.0, "I": 0.0}[value] if isinstance(value, str) else value

    of_scorers = {
        **dict.fromkeys(("Metric", "SampleScore", "Score", "Scorer", "Target", "accuracy"), dict),
        "CORRECT": "C",
        "INCORRECT": "I",
        "metric": lambda function: function,
        "scorer": lambda metrics: lambda function: function,
        "value_to_float": lambda: to_float,
    }
    modules = {"scorer": of_scorers, "solver": {"TaskState": dict}}
    monkeypatch.setitem(sys.modules, "inspect_ai", ModuleType("inspect_ai"))
    for name, content in modules.items():
        module = ModuleType(f"inspect_ai.{name}")
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = "megatron_dcpo.evaluation.inspect_scorer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def scores(*values: str | float) -> list[SimpleNamespace]:
    """Two answers to each sample, with rising confidences."""
    found = []
    for number, value in enumerate(values):
        metadata = {"confidence": number / 10, "kind": None}
        score = SimpleNamespace(value=value, metadata=metadata)
        found.append(SimpleNamespace(score=score, sample_id=number // 2))
    return found


def test_verdicts_of_each_epoch_have_the_metrics_of_the_library(scorer: ModuleType) -> None:
    answers = scores("I", "C", "C", "I")
    confidences, right = [0.0, 0.1, 0.2, 0.3], [0, 1, 1, 0]
    assert scorer.ece()(answers) == ece(confidences, right)
    of_problems = auroc_within_problem(confidences, right, [0, 0, 1, 1]).value
    assert scorer.auroc_within_problem()(answers) == of_problems
    assert math.isnan(scorer.auroc_within()(answers))  # without kinds


@pytest.mark.parametrize("name", ["ece", "brier", "auroc", "auroc_within", "auroc_within_problem"])
def test_a_mean_over_epochs_is_no_verdict(scorer: ModuleType, name: str) -> None:
    assert math.isnan(getattr(scorer, name)()(scores(1.0, 0.5, 0.0)))
