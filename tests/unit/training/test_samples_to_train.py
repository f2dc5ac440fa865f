"""Which responses take part in forward and backward: those that can have a gradient, and a sample
of the others.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_dcpo.training.dealing import samples_to_train
from megatron_dcpo.types import Judgement, TrainingSample
from tests.helpers.objective_cases import objective, samples_of


def group(name: str, pairs: list[tuple[float, float]]) -> list[Judgement]:
    return [Judgement(name, R, c, "ok", boundary=3, length=5) for R, c in pairs]


def chosen(
    options: dict[str, Any], *groups: list[Judgement], megatron: dict[str, Any] | None = None
) -> list[int]:
    method = objective(**options)
    samples: list[TrainingSample] = method.score(
        samples_of([judgement for one in groups for judgement in one])
    )
    taken = [id(sample) for sample in samples_to_train(samples, method, megatron or {})]
    return [i for i, sample in enumerate(samples) if id(sample) in taken]


IDLE, MOVING = group("idle", [(1, 0.9)] * 18), group("moving", [(1, 0.9), (0, 0.9)])


def test_every_sixteenth_of_the_others_is_computed() -> None:
    assert chosen({"name": "grpo"}, IDLE, MOVING) == [0, 16, 18, 19]
    assert chosen({"name": "grpo"}, MOVING, IDLE) == [0, 1, 2, 18]


def test_one_is_computed_where_none_has_a_gradient() -> None:
    assert chosen({"name": "grpo"}, IDLE[:8]) == [0]


def test_equal_answers_with_other_confidences_are_computed_where_the_confidence_learns() -> None:
    right = group("right", [(1, 0.9), (1, 0.2), (1, 0.9)])
    assert chosen({"name": "grpo"}, right) == [0]
    assert chosen({"name": "dcpo"}, right) == [0, 1, 2]
    assert chosen({"name": "dcpo", "weight_confidence": 0.0}, right) == [0]


@pytest.mark.parametrize(
    "options",
    [
        {"kl_coef_confidence": 0.1},
        {"entropy_coef_reasoning": 0.1},
        {"entropy_target": 0.1},  # measured on all, also while its coefficient is 0
    ],
)
def test_all_are_computed_where_another_term_needs_them(options: dict[str, Any]) -> None:
    assert chosen({"name": "grpo", **options}, IDLE, MOVING) == list(range(20))


@pytest.mark.parametrize(
    "option", ["moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_enable_expert_bias"]
)
def test_all_are_computed_where_every_token_moves_the_routers(option: str) -> None:
    assert chosen({"name": "grpo"}, IDLE, megatron={option: 0.01}) == list(range(18))
    assert chosen({"name": "grpo"}, IDLE, megatron={option: 0}) == [0, 16]
