"""Which groups train the policy, and which responses have a gradient in a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.objectives.method import SCORES, Method
from megatron_dcpo.types import BLOCK_CONFIDENCE, BLOCK_REASONING, Judgement, TrainingSample
from tests.helpers.objective_cases import objective, samples_of


def judgements(*pairs: tuple[float, float | None]) -> list[Judgement]:
    return [
        Judgement("p", R, c, "missing" if c is None else "ok", boundary=3, length=5)
        for R, c in pairs
    ]


def does_train(method: Method, samples: list[TrainingSample]) -> bool:
    return method.trains(samples, method.group_scores(samples))


@pytest.mark.parametrize(
    ("options", "group", "trains"),
    [
        ({"name": "grpo"}, [(1, 0.9), (1, 0.2)], False),
        ({"name": "grpo"}, [(1, 0.9), (0, 0.9)], True),
        ({"name": "dcpo"}, [(1, 0.9), (1, 0.2)], True),  # all right: the confidence learns
        ({"name": "dcpo"}, [(1, 0.9), (1, 0.9)], False),
        ({"name": "dcpo", "weight_confidence": 0.0}, [(1, 0.9), (1, 0.2)], False),
        ({"name": "dcpo", "weight_confidence": 0.0}, [(1, 0.9), (0, 0.9)], True),
        (
            {"name": "dcpo", "advantage_normalization_confidence": "batch_std"},
            [(1, 0.9), (1, 0.89)],
            True,
        ),
        (
            {"name": "dcpo", "advantage_normalization_confidence": "batch_std"},
            [(1, 0.9), (1, 0.9)],
            False,
        ),
        ({"name": "dcpo", "kl_coef": 0.1}, [(0, 0.9), (0, 0.9)], False),
    ],
)
def test_a_group_trains_when_a_block_has_an_advantage(
    options: Any, group: Any, trains: bool
) -> None:
    assert does_train(objective(**options), samples_of(judgements(*group))) is trains


@pytest.mark.parametrize(
    ("options", "bearing"),
    [
        (
            {"name": "dcpo"},
            ([False, False], [True, True]),
        ),  # all right: no gradient in the reasoning
        ({"name": "dcpo", "weight_confidence": 0.0}, ([False, False], [False, False])),
        ({"name": "dcpo", "kl_coef_reasoning": 0.1}, ([True, True], [True, True])),
        ({"name": "ccgspg"}, ([True, True], [True, True])),  # another loss: nothing is known of it
    ],
)
def test_which_responses_have_a_gradient_in_a_block(options: Any, bearing: Any) -> None:
    method = objective(**options)
    old = [np.zeros(5)] * 2 if method.needs_old_logprobs else None
    scored = method.score(samples_of(judgements((1, 0.9), (1, 0.2)), old))
    for block, expected in zip((BLOCK_REASONING, BLOCK_CONFIDENCE), bearing, strict=True):
        assert [method.has_gradient(sample, block) for sample in scored] == expected


def test_truncated_responses_that_are_masked_train_nothing() -> None:
    group = samples_of(
        [Judgement("p", R, None, "truncated", boundary=5, length=5) for R in (0.0, 1.0)]
    )
    assert does_train(objective(name="grpo", mask_truncated=False), group)
    assert not does_train(objective(name="grpo", mask_truncated=True), group)


def test_a_graded_score_is_the_reward_and_the_target() -> None:
    """t = lam mean(R) + (1 - lam) R of the scores, whatever the threshold makes of them."""
    pairs = (0.25, 0.9), (0.75, 0.1)
    graded = [
        replace(j, correct=float(j.correct > 0.5), score=j.correct) for j in judgements(*pairs)
    ]
    scores = objective(name="dcpo", lam=0.5).group_scores(samples_of(graded))
    rows = dict(zip(SCORES, scores, strict=True))
    assert rows["R"].tolist() == [0.25, 0.75]
    assert rows["target"].tolist() == [0.375, 0.625]
    np.testing.assert_allclose(rows["R_c"], [-0.525, -0.525])


@pytest.mark.parametrize("right", [0, 1, 4])
@pytest.mark.parametrize("hundredths", [3, 17, 50, 99])
def test_rounding_is_no_signal(hundredths: int, right: int) -> None:
    """Equal confidences have a counterfactual advantage of 0, of which float64 may leave 1e-17: it
    neither counts as a signal nor dilutes the weight of other groups' tokens.
    """
    method = objective(name="dcpo", preset="dcpo_proper", block_groups="signal", weight_reasoning=0)
    constant = judgements(*[(float(i < right), hundredths / 100) for i in range(4)])
    assert not method.trains(samples_of(constant))
    bearing = judgements((1, 0.9), (1, 0.2), (0, 0.7), (0, 0.1))
    others = [replace(j, prompt_id=name) for name in "xyz" for j in constant]
    alone = method.score(samples_of(bearing))
    together = method.score(samples_of([*bearing, *others]))
    assert alone[0].weights is not None
    assert together[0].weights is not None
    np.testing.assert_array_equal(together[0].weights, alone[0].weights)


@pytest.mark.parametrize("ddof", [0, 1])
def test_equal_counterfactual_advantages_are_divided_by_their_size(ddof: int) -> None:
    """The ideal group, right at 1.0 and wrong at 0.0: s = sqrt(4 (2/3)^2 / (4 - ddof)), where the
    standard deviation is 0.
    """
    method = objective(
        name="dcpo",
        lam=0,
        calibration_loss="brier",
        ddof=ddof,
        confidence_baseline="counterfactual",
        advantage_normalization_confidence="std",
    )
    ideal = judgements((1, 1.0), (1, 1.0), (0, 0.0), (0, 0.0))
    A_c = method.group_scores(samples_of(ideal))[SCORES.index("A_c")]
    np.testing.assert_allclose(A_c, np.sqrt((4 - ddof) / 4), rtol=1e-5)
