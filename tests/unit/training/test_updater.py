"""Updater alone: mini-batches, deals, updates that are skipped; the passes are counted
elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.config import TrainingConfig, load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.training.sampler import SamplerState
from megatron_dcpo.training.trainer import Trainer
from megatron_dcpo.training.updater import Updater, split_groups
from megatron_dcpo.types import Judgement, Prompt, TrainingSample
from tests.helpers.objective_cases import objective, samples_of
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import one_rank, sampler_of


@pytest.fixture(autouse=True, scope="module")
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


class Steps:
    """An optimizer that notes what it is asked."""

    learning_rate = 0.125

    def __init__(self, norm: float = 1.0) -> None:
        self.norm = norm
        self.taken = 0
        self.gathered = 0

    def zero_gradients(self) -> None:
        pass

    def gradient_norm(self) -> float:
        return self.norm

    def step(self) -> None:
        self.taken += 1

    def gather_parameters(self) -> None:
        self.gathered += 1


class Stubbed(Updater):
    """An updater whose loss is given, whatever the samples are."""

    loss = 0.5

    def accumulate(self, samples: Any) -> list[dict[str, float]]:
        return [{"loss": self.loss / 2, "tokens/reasoning": 3.0}, {"loss": self.loss / 2}]


def updater(optimizer: Any, ranks: int = 1, rank: int = 0, **training: Any) -> Stubbed:
    topology = SimpleNamespace(reports=True, rank=rank, dp_size=ranks, dp_rank=rank, pp_size=1)
    policy: Any = SimpleNamespace(topology=topology)
    config = load_config(QUICKSTART / "dcpo.yaml")
    options = TrainingConfig(**{"steps": 1, **training})
    trainer = Trainer(
        policy=policy, optimizer=optimizer, parallel=config.parallel, training=options
    )
    return Stubbed(
        trainer=trainer,
        method=objective(),
        reference=None,
        teacher=None,
        callback=None,
        config=dataclasses.replace(config, training=options),
    )


def update(target: Updater, batch: list[TrainingSample], step: int) -> Any:
    return target.update(batch, target.method.group_scores(batch), step)


def samples(groups: int = 1, lengths: tuple[int, ...] = (5, 6, 7)) -> list[TrainingSample]:
    pairs = (1, 0.9), (0, 0.4), (0, 0.1)
    return samples_of(
        [
            Judgement(f"p{group}", R, c, "ok", boundary=3, length=length)
            for group in range(groups)
            for (R, c), length in zip(pairs, lengths, strict=True)
        ]
    )


def test_an_update_returns_scores_and_statistics() -> None:
    optimizer = Steps()
    scored, statistics = update(updater(optimizer), samples(), step=1)
    assert [sample.R for sample in scored] == [1.0, 0.0, 0.0]
    assert all(sample.weights is not None for sample in scored)
    assert (statistics.losses, statistics.grad_norms) == ([0.5], [1.0])
    assert statistics.sums == {"tokens/reasoning": 3.0}
    assert statistics.learning_rate == 0.125
    assert len(statistics.trained) == 3
    assert (optimizer.taken, optimizer.gathered) == (1, 1)


def test_an_update_that_is_not_finite_is_skipped_and_counted() -> None:
    optimizer = Steps(norm=math.inf)
    target = updater(optimizer)
    for step in (1, 2):
        _, statistics = update(target, samples(), step=step)
        assert (optimizer.taken, statistics.skipped, statistics.losses) == (0, 1, [])
        assert target.state_dict()["nonfinite_in_a_row"] == step

    resumed = updater(optimizer)
    resumed.load_state_dict(target.state_dict(), step=2)
    with pytest.raises(UserError, match="3 updates in a row"):
        update(resumed, samples(), step=3)

    optimizer.norm = 1.0
    update(target, samples(), step=3)
    assert target.state_dict()["nonfinite_in_a_row"] == 0


def test_every_sample_is_computed_by_one_rank() -> None:
    """Equal counts."""
    batch = samples(groups=4, lengths=(5, 40, 9))
    shares = [updater(Steps(), ranks=3, rank=rank).trainer.deal(batch)[0] for rank in range(3)]
    assert sorted(index for share in shares for index in share) == list(range(12))
    assert {len(share) for share in shares} == {4}


def test_mini_batches_are_whole_groups() -> None:
    batch = samples(groups=4)
    shuffled = [batch[index] for index in (3, 0, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11)]
    parts = split_groups(shuffled, 2, is_full=lambda rows: True)
    assert [{shuffled[row].prompt.prompt_id for row in part} for part in parts] == [
        {"p1", "p0"},
        {"p2", "p3"},
    ]
    assert [len(part) for part in parts] == [6, 6]


def test_mini_batches_have_as_many_groups_of_either_kind() -> None:
    """No group is left out when the numbers do not divide."""
    batch = samples(groups=7)
    full = {"p0", "p1", "p2", "p6"}
    parts = split_groups(batch, 2, is_full=lambda rows: batch[rows[0]].prompt.prompt_id in full)
    names = [list(dict.fromkeys(batch[row].prompt.prompt_id for row in part)) for part in parts]
    assert names == [["p0", "p1", "p3", "p4"], ["p2", "p5", "p6"]]


def test_two_updates_of_a_rollout_are_two_steps() -> None:
    optimizer = Steps()
    target = updater(optimizer, updates_per_rollout=2)
    target.with_old_logprobs = lambda batch: list(batch)  # type: ignore[method-assign]
    _, statistics = update(target, samples(groups=2), step=1)
    assert optimizer.taken == len(statistics.losses) == 2


def test_a_callback_is_called_before_every_update_and_its_numbers_are_kept() -> None:
    optimizer = Steps()
    target = updater(optimizer, updates_per_rollout=2)
    target.with_old_logprobs = lambda batch: list(batch)  # type: ignore[method-assign]
    seen: list[tuple[int, int, int]] = []

    def callback(updater: Any, batch: Any, step: int) -> dict[str, float]:
        seen.append((step, len(batch), optimizer.taken))
        return {"mine/taken": optimizer.taken}

    target.callback = callback
    _, statistics = update(target, samples(groups=2), step=7)
    assert seen == [(7, 3, 0), (7, 3, 1)]
    assert statistics.callback == {"mine/taken": [0.0, 1.0]}


@pytest.mark.parametrize("returned", [{"mine": "high"}, None])
def test_a_callback_that_fails_is_named(returned: Any) -> None:
    target = updater(Steps(), callback="mine.py:measure")
    target.callback = lambda updater, batch, step: returned
    with pytest.raises(UserError, match=r"training\.callback=mine\.py:measure"):
        update(target, samples(), step=1)


@pytest.mark.parametrize("filter_groups", ["none", "reasoning", "any"])
def test_a_group_is_scored_once_a_step(filter_groups: str) -> None:
    """The filter, the choice of groups, the mini-batches and the update read what the sampler
    scored.
    """
    scored: list[int] = []
    method = objective(name="dcpo")

    def counting(R: Any, c: Any, logprob: Any, options: Any) -> Any:
        scored.append(len(R))
        return method.score_group(R, c, logprob, options)

    def half_right(responses: Any, by_id: Any) -> list[Judgement]:
        return [
            Judgement(r.prompt_id, float(r.sample_index % 2), 0.5, "ok", 1, len(r.token_ids))
            for r in responses
        ]

    counted = dataclasses.replace(method, score_group=counting)
    prompts = [Prompt(str(number), (), (1,), "1", "t") for number in range(4)]
    sampler = sampler_of(
        prompts,
        "data.prompts_per_step=4",
        "rollout.group_size=4",
        f"rollout.filter_groups={filter_groups}",
        method=counted,
        judge=half_right,
    )
    batch, _ = sampler.sample(SamplerState(), step=1, versions=range(1))
    target = updater(Steps(), updates_per_rollout=2)
    target.method = counted
    target.with_old_logprobs = lambda samples: list(samples)  # type: ignore[method-assign]
    target.update(batch.samples, batch.scores, step=1)
    assert scored == [4] * 4
