"""The teacher of a confidence adapter: what a regression fitted on other problems says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.samples import Measures, Sample
from megatron_dcpo.training.confidence_adapter import (
    ENOUGH_ANSWERS,
    FittedAnswers,
    taught,
    warn_of_fit,
)
from megatron_dcpo.types import Judgement, Prompt, Response


def sample(problem: int, repeat: int, correct: bool, **measures: Any) -> Sample:
    name = str(problem)
    empty = np.zeros(0)
    return Sample(
        prompt=Prompt(name, (), (), "6", "task", problem="2*3=", kind="a"),
        response=Response(name, repeat, empty, empty, "stop", 0, text="6"),
        judgement=Judgement(name, float(correct), 0.5, "ok", boundary=4, length=8),
        measures=Measures(**measures),
    )


def answers(informative: bool = True) -> list[Sample]:
    """Right answers are more probable; every fifth one is wrong all the same."""
    chosen = np.random.default_rng(0)
    found = []
    for index in range(200):
        right = bool(chosen.random() < 0.6)
        logprob = -1.0 if right == (index % 5 != 0) else -8.0
        measures = {"reasoning_logprob": logprob} if informative else {}
        found.append(sample(index // 2, index % 2, right, **measures))
    return found


def test_it_knows_what_the_log_probs_know() -> None:
    samples = answers()
    targets = np.array(taught(samples, "task", seed=0))
    correct = np.array([float(each.correct) for each in samples])
    assert ((targets > 0) & (targets < 1)).all()
    probable = np.array([each.measures.reasoning_logprob == -1.0 for each in samples])
    assert targets[probable].mean() > 0.7 > 0.4 > targets[~probable].mean()
    assert targets.mean() == pytest.approx(correct.mean(), abs=0.05)


def test_an_answer_does_not_teach_itself() -> None:
    """A verdict that is turned around changes no target of its own problem."""
    samples = answers()
    before = taught(samples, "task", seed=0)
    first = samples[0]
    logprob = first.measures.reasoning_logprob
    turned = sample(0, 0, not first.correct, reasoning_logprob=logprob)
    after = taught([turned, *samples[1:]], "task", seed=0)
    assert after[:2] == pytest.approx(before[:2], abs=1e-12)
    assert after[2:] != before[2:]


def test_without_log_probs_there_is_no_teacher() -> None:
    with pytest.raises(UserError, match="log-probs"):
        taught(answers(informative=False), "task", seed=0)


@pytest.mark.parametrize(
    ("count", "kinds", "warnings"),
    [
        (ENOUGH_ANSWERS, {"a": ENOUGH_ANSWERS}, 0),
        (ENOUGH_ANSWERS - 1, {"a": ENOUGH_ANSWERS - 1}, 1),
        (ENOUGH_ANSWERS, {"b": ENOUGH_ANSWERS}, 1),
        (50, {"b": 50}, 2),
        (ENOUGH_ANSWERS, {}, 0),  # the fitted problems named no kinds
    ],
)
def test_few_answers_and_kinds_that_were_not_fitted_are_warned_of(
    caplog: pytest.LogCaptureFixture, count: int, kinds: dict[str, int], warnings: int
) -> None:
    fitted = FittedAnswers(count=count, kinds=kinds, kinds_by="")
    warn_of_fit(fitted, [sample(1, 0, True), sample(2, 0, False)])
    assert len(caplog.records) == warnings


def test_the_fitted_kinds_are_counted_and_read_again() -> None:
    fitted = FittedAnswers.of([sample(1, 0, True), sample(1, 1, True)], "")
    assert (fitted.count, fitted.kinds) == (2, {"a": 2})
    assert FittedAnswers.of([sample(12, 0, True)], "digits").kinds == {"1": 1}
    assert FittedAnswers.described({"answers": 2, "kinds": {"a": 2}, "kinds_by": ""}) == fitted
    assert FittedAnswers.described({"answers": 7}).kinds == {}
