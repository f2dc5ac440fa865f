"""``objective.block_groups: signal``: each block trains on, and divides by, the groups in which it
has a signal.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megatron_dcpo.objectives.method import Method
from megatron_dcpo.types import Judgement, TrainingSample
from tests.helpers.objective_cases import objective, samples_of


def group(name: str, *pairs: tuple[float, float]) -> list[Judgement]:
    """Responses of three tokens of reasoning and two of confidence: correctness, confidence."""
    return [Judgement(name, R, c, "ok", boundary=3, length=5) for R, c in pairs]


# both blocks have a signal in the first, the confidence alone in the second, none in the third
GROUPS = [
    *group("mixed", (1, 0.9), (0, 0.6)),
    *group("right", (1, 0.9), (1, 0.2)),
    *group("wrong", (0, 0.5), (0, 0.5)),
]


def weights(**options: Any) -> list[list[float]]:
    """The weights of a reasoning and a confidence token of each response."""
    scored = objective(**options).score(samples_of(GROUPS))
    found = []
    for sample in scored:
        assert sample.weights is not None
        assert len(set(sample.weights[:3])) == len(set(sample.weights[3:])) == 1
        found.append([float(sample.weights[0]), float(sample.weights[4])])
    return found


@pytest.mark.parametrize(
    ("aggregation", "reasoning", "confidence"),
    [
        # 1 / (responses of the block's groups x 5 tokens)
        ("sequence_mean", 1 / (2 * 5), 1 / (4 * 5)),
        # 1 / tokens of these responses
        ("token_mean", 1 / 10, 1 / 20),
        # 1 / tokens of the block in these responses
        ("block_mean", 1 / 6, 1 / 8),
        # 1 / (responses x longest response)
        ("constant", 1 / (2 * 7), 1 / (4 * 7)),
    ],
)
def test_golden_weights(aggregation: str, reasoning: float, confidence: float) -> None:
    found = weights(
        name="dcpo", block_groups="signal", loss_aggregation=aggregation, max_response_length=7
    )
    np.testing.assert_allclose(
        found,
        [
            [reasoning, confidence],
            [reasoning, confidence],
            [0, confidence],
            [0, confidence],
            [0, 0],
            [0, 0],
        ],
        rtol=1e-15,
    )


def test_all_groups_count_by_default() -> None:
    assert weights(name="dcpo") == [[1 / 30, 1 / 30]] * 6


def test_the_loss_of_grpo_is_that_of_the_informative_groups_alone() -> None:
    """Dull groups beside them change nothing: what a filter that dropped them would train on."""
    with_dull = objective(name="grpo", block_groups="signal").score(samples_of(GROUPS))
    alone = objective(name="grpo").score(samples_of(GROUPS[:2]))
    for sample, other in zip(with_dull, alone, strict=False):
        np.testing.assert_array_equal(sample.weights, other.weights)
        np.testing.assert_array_equal(sample.advantages, other.advantages)
    assert not any(np.any(sample.weights) for sample in with_dull[2:])


def test_a_coupled_reward_gives_an_all_right_group_no_signal_in_the_reasoning() -> None:
    """Its advantage comes from the confidences; the same groups count for every method."""
    found = weights(name="rlcr", block_groups="signal")
    assert [pair[0] > 0 for pair in found] == [True, True, False, False, False, False]
    assert [pair[1] > 0 for pair in found] == [True, True, True, True, False, False]


def test_masked_responses_are_no_members() -> None:
    cut = [Judgement("cut", R, None, "truncated", boundary=5, length=5) for R in (1.0, 0.0)]
    method = objective(name="grpo", block_groups="signal", mask_truncated=True)
    scored = method.score(samples_of([*GROUPS, *cut]))
    assert not any(np.any(sample.weights) for sample in scored[-2:])
    np.testing.assert_allclose(scored[0].weights, 1 / 10, rtol=1e-15)


# ------------------------------------------------------------------- informative groups


def informative(judgements: list[Judgement], **options: Any) -> bool:
    method = objective(**options)
    samples = samples_of(judgements)
    return method.is_informative(samples, method.group_scores(samples))


@pytest.mark.parametrize("name", ["grpo", "dcpo", "coupled", "rlcr", "ternary"])
@pytest.mark.parametrize("preset", ["paper", "dcpo_proper"])
def test_the_same_groups_are_informative_for_every_method(name: str, preset: str) -> None:
    options = {"name": name, "preset": preset}
    assert informative(group("p", (1, 0.9), (0, 0.6)), **options)
    assert not informative(group("p", (1, 0.9), (1, 0.2)), **options)
    assert not informative(group("p", (0, 0.9), (0, 0.2)), **options)


def test_a_length_penalty_makes_no_group_informative() -> None:
    """As in DAPO, whose filter looks at the accuracy."""
    judgements = [Judgement("p", 1.0, 0.5, "ok", boundary=3, length=length) for length in (5, 9)]
    options = {"overlong_buffer": 5, "max_response_length": 10}
    assert not informative(judgements, name="grpo", **options)


def test_an_abstention_tells_apart_where_it_is_rewarded() -> None:
    judgements = [
        Judgement("p", 0.0, 0.5, "ok", boundary=3, length=5, abstained=abstained)
        for abstained in (True, False)
    ]
    assert informative(judgements, name="ternary")
    assert not informative(judgements, name="dcpo")


def test_graded_scores_tell_apart() -> None:
    judgements = [
        Judgement("p", 0.0, 0.5, "ok", boundary=3, length=5, score=score) for score in (0.25, 0.5)
    ]
    assert informative(judgements, name="grpo")


# ------------------------------------------------------------------- what is computed


def has_gradient(method: Method, samples: list[TrainingSample]) -> list[bool]:
    return [method.has_gradient(sample) for sample in samples]


def test_a_response_of_neither_block_is_not_computed_for_its_kl_alone() -> None:
    method = objective(name="grpo", block_groups="signal", kl_coef=0.1)
    scored = method.score(samples_of(GROUPS))
    assert has_gradient(method, scored) == [True, True, False, False, False, False]
