"""How many passes a training makes for old log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.config import TrainingConfig, load_config
from megatron_dcpo.training.trainer import Trainer
from megatron_dcpo.training.updater import Updater
from megatron_dcpo.types import Judgement, TrainingSample
from tests.helpers.objective_cases import objective, samples_of
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import one_rank


class Counting(Updater):
    """Counts mini-batches that are passed forward; notes whether each update compares engine and
    trainer.
    """

    scored = 0
    compared: list[bool]

    def accumulate(self, samples: Any) -> list[dict[str, float]]:
        self.compared.append(self.measures_mismatch)
        return [{"loss": 0.0}]

    def with_old_logprobs(self, samples: Any) -> list[TrainingSample]:
        self.scored += 1
        return list(samples)


@pytest.fixture(autouse=True, scope="module")
def group_of_one() -> Iterator[None]:
    with one_rank():
        yield


def trained(training: TrainingConfig, groups: int = 1, **options: Any) -> Counting:
    """Return the updater after ``training.steps`` steps of ``groups`` groups of three."""
    optimizer: Any = SimpleNamespace(learning_rate=0.0)
    for name in ("zero_gradients", "gradient_norm", "step", "gather_parameters"):
        setattr(optimizer, name, lambda: 0.0)
    topology = SimpleNamespace(reports=True, rank=0, dp_size=1, dp_rank=0, pp_size=1)
    policy: Any = SimpleNamespace(topology=topology)

    config = load_config(QUICKSTART / "dcpo.yaml")
    trainer = Trainer(
        policy=policy, optimizer=optimizer, parallel=config.parallel, training=training
    )
    updater = Counting(
        trainer=trainer,
        method=objective(**{"name": "dcpo", **options}),
        reference=None,
        teacher=None,
        callback=None,
        config=dataclasses.replace(config, training=training),
    )
    updater.compared = []
    pairs = (1, 0.9), (0, 0.4), (0, 0.1)  # all train reasoning and confidence
    names = [f"p{number}" for number in range(groups)]
    samples = samples_of(
        [Judgement(name, R, c, "ok", boundary=3, length=5) for name in names for R, c in pairs]
    )
    for step in range(1, training.steps + 1):
        updater.update(samples, updater.method.group_scores(samples), step)
    return updater


def test_the_engines_log_probs_save_the_pass_for_old_ones() -> None:
    """And engine and trainer are compared before the policy moves: the second update has no
    log-probs of that policy.
    """
    two = TrainingConfig(steps=1, updates_per_rollout=2)
    by_trainer, by_engine = (trained(two, groups=2), trained(two, groups=2, old_logprobs="engine"))
    assert (by_trainer.scored, by_trainer.compared) == (2, [True, True])
    assert (by_engine.scored, by_engine.compared) == (0, [True, False])
