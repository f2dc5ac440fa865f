"""``rollout.filter_groups``: which prompts are taken when the groups of some have no signal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import Steps, number_of, numbered_sampler, one_rank


@pytest.fixture(autouse=True, scope="module")
def _group_of_one() -> Iterator[None]:
    with one_rank():
        yield


def filling(dull: set[int], *overrides: str) -> Steps:
    """Sampling over 40 prompts of which the groups of ``dull`` train nothing, two responses
    each.
    """
    settings = ["data.prompts_per_step=4", "rollout.group_size=2", "data.shuffle=false", *overrides]
    return Steps(numbered_sampler(lambda number: number not in dull, 40, *settings, file="dcpo"))


def steps(run: Steps, *numbers: int) -> list[list[int]]:
    """The prompts of each step's batch."""
    return [
        numbers_of(sample.prompt.prompt_id for sample in run.take(number)) for number in numbers
    ]


def rounds(run: Any) -> list[list[int]]:
    """The prompts of each round so far."""
    return [numbers_of(prompt_id for prompt_id, _ in asked) for asked in run.sampler.engine.asked]


def numbers_of(prompt_ids: Iterator[str]) -> list[int]:
    return [number_of(prompt_id) for prompt_id in dict.fromkeys(prompt_ids)]


def counts(run: Steps) -> dict[str, float]:
    """What the last step says of the groups it drew."""
    return {
        name.removeprefix("rollout/"): value
        for name, value in run.metrics.items()
        if name != "rollout/accuracy"
    }


# ------------------------------------------------------------------- by the reasoning (true)


def test_prompts_are_drawn_until_enough_groups_are_informative() -> None:
    """The dull groups that came with them stay in the batch, for the confidence."""
    run = filling({0, 2, 5, 6}, "rollout.filter_groups=reasoning")
    assert steps(run, 1) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert rounds(run) == [[0, 1, 2, 3], [4, 5], [6], [7]]
    assert counts(run) == {
        "prompts_drawn": 8,
        "groups_filtered": 0,
        "informative_groups": 4,
        "informative_groups_total": 4,
        "responses": 16,
        "responses_total": 16,
    }
    assert steps(run, 2) == [[8, 9, 10, 11]]
    assert run.state.position == 12
    assert counts(run)["informative_groups_total"] == 8
    assert counts(run)["responses_total"] == 24


def test_true_means_reasoning() -> None:
    run = filling({0}, "rollout.filter_groups=true")
    assert run.sampler.rollout.filter_groups == "reasoning"
    assert steps(run, 1) == [[0, 1, 2, 3, 4]]


def test_groups_behind_the_last_informative_one_are_drawn_again() -> None:
    """They are in no batch twice, though their responses were sampled twice."""
    run = filling({0, 5}, "rollout.filter_groups=true", "rollout.oversample=1.5")
    assert steps(run, 1) == [[0, 1, 2, 3, 4]]
    assert rounds(run) == [[0, 1, 2, 3, 4, 5]]
    assert counts(run)["groups_filtered"] == 1
    assert counts(run)["responses"] == 12
    assert run.state.position == 5
    assert steps(run, 2) == [[5, 6, 7, 8, 9]]


def test_all_that_was_drawn_trains_the_confidence_when_no_group_is_informative(caplog: Any) -> None:
    run = filling(set(range(40)), "rollout.filter_groups=true", "rollout.max_refills=2")
    assert steps(run, 1) == [list(range(12))]
    assert len(rounds(run)) == 3
    (warning,) = caplog.messages
    assert "rollout.max_refills=2" in warning
    assert counts(run)["informative_groups"] == 0
    assert run.state.position == 12


# ------------------------------------------------------------------- by any block


def test_dull_groups_are_replaced_by_the_prompts_that_follow() -> None:
    run = filling({0, 2, 5, 6}, "rollout.filter_groups=any")
    assert steps(run, 1) == [[1, 3, 4, 7]]
    assert rounds(run) == [[0, 1, 2, 3], [4, 5], [6], [7]]
    assert counts(run)["prompts_drawn"] == 8
    assert counts(run)["groups_filtered"] == 4
    assert steps(run, 2) == [[8, 9, 10, 11]], "the next step goes on behind the last one taken"
    assert run.state.position == 12


def test_what_is_drawn_ahead_and_not_taken_is_drawn_again() -> None:
    run = filling({0}, "rollout.filter_groups=any", "rollout.oversample=1.5")
    assert steps(run, 1, 2) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert rounds(run) == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]
    assert run.state.position == 9


def test_there_is_an_end_when_every_group_is_dull(caplog: Any) -> None:
    run = filling(set(range(40)), "rollout.filter_groups=any", "rollout.max_refills=2")
    assert steps(run, 1) == [[0, 1, 2, 3]]
    assert len(rounds(run)) == 3
    (warning,) = caplog.messages
    assert "rollout.max_refills=2" in warning
    assert run.state.position == 12
    assert steps(run, 2) == [[12, 13, 14, 15]]


def test_without_the_filter_every_group_is_taken() -> None:
    run = filling(set(range(40)))
    assert steps(run, 1, 2) == rounds(run) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert run.state.position == 8
    assert "rollout/groups_filtered" not in run.metrics


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.oversample=2"], "rollout.filter_groups"),
        (["rollout.filter_groups=true", "objective.name=ccgspg"], "objective.name=ccgspg"),
        (["rollout.filter_groups=true", "objective.name=posthoc"], "rollout.filter_groups=any"),
        (
            ["rollout.filter_groups=true", "objective.weight_reasoning=0"],
            "objective.weight_reasoning",
        ),
        (["rollout.filter_groups=true", "objective.block_groups=all"], "objective.block_groups"),
        (["rollout.filter_groups=confidence"], "rollout.filter_groups"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(QUICKSTART / "grpo.yaml", overrides)
