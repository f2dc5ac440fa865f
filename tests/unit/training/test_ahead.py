"""``rollout.async_steps``: the same batches, sampled while the one before trains, none lost and
none trained on twice.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import Stopped, UserError
from megatron_dcpo.rollout import EngineError
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.training.ahead import Ahead, Immediate
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import Clockwork, number_of, numbered_sampler, one_rank

STEPS, PROMPTS = 12, 8
SERVER = (
    "rollout.engine=server",
    "rollout.endpoint=http://here/v1",
    "objective.tis_level=token",
    f"data.prompts_per_step={PROMPTS}",
    "data.shuffle=false",
    "rollout.group_size=4",
)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def ahead_of(
    trains: Any = lambda number: True,
    staleness: int = 0,
    kind: type[Ahead] = Ahead,
    **replaced: Any,
) -> Ahead:
    """What hands over the batches of a sampler of 1,000 prompts. The rules that refuse a
    ``staleness`` beside a server are passed by: they are the client's, not the loop's.
    """
    sampler = numbered_sampler(
        trains, 1000, *SERVER, "rollout.async_steps=1", *replaced.pop("overrides", ())
    )
    more = {"max_staleness": staleness, "oversample": 1.5} if staleness else {}
    sampler.rollout = dataclasses.replace(sampler.rollout, **more)
    for name, value in replaced.items():
        setattr(sampler, name, value)
    return kind(sampler, STEPS, 1)


def run(ahead: Ahead, first: int = 1, last: int = STEPS) -> list[list[Any]]:
    """The loop: the engine has the weights ``step - 1`` when a step begins."""
    batches = []
    for step in range(first, last + 1):
        ahead.sampler.engine.weights_version = step - 1
        batches.append(ahead.take(step))
        ahead.start(step + 1)
        consumed = ahead.sampler.consumed_prompts(
            step
        )  # what a checkpoint holds, whatever is on its way
        ahead.wait()
        assert ahead.sampler.consumed_prompts(step) == consumed
    return batches


def numbers(batches: list[list[Any]]) -> list[int]:
    return [number_of(sample.prompt.prompt_id) for batch in batches for sample in batch]


def test_every_batch_but_the_first_is_one_update_behind() -> None:
    ahead = ahead_of()
    batches = run(ahead)
    behind = [
        {step - s.response.weights_version for s in batch} for step, batch in enumerate(batches)
    ]
    assert behind == [{0}] + [{1}] * (STEPS - 1)
    assert numbers(batches) == [number for number in range(STEPS * PROMPTS) for _ in range(4)]
    assert ahead.sampler.metrics == {"rollout/staleness_mean": 1.0, "rollout/staleness_max": 1}
    assert ahead.batch is None, "nothing is sampled behind the last step"


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_filters_and_partial_rollouts_draw_as_one_after_the_other(staleness: int) -> None:
    """What is drawn, filtered and carried depends on the clockwork alone; tokens are as old as
    allowed.
    """
    overrides = ["rollout.filter_groups=true"]
    ahead = ahead_of(lambda number: number % 3 > 0, staleness, overrides=overrides)
    alone = ahead_of(lambda number: number % 3 > 0, staleness, overrides=overrides)
    batches, reference = run(ahead), []
    for step in range(1, STEPS + 1):
        alone.sampler.engine.weights_version = step - 1
        reference.append(alone.sampler.sample(step))
    assert numbers(batches) == numbers(reference)
    assert max(Counter(numbers(batches)).values()) == 4
    assert ahead.sampler.extra_prompts == alone.sampler.extra_prompts > 0
    oldest = [
        max(step - s.response.oldest_version for s in batch) for step, batch in enumerate(batches)
    ]
    assert max(oldest) <= 1 + staleness
    assert max(oldest) > staleness or staleness == 3
    assert ahead.sampler.metrics["rollout/staleness_max"] == oldest[-1]


class Failing(Clockwork):
    """Fails once, in the batch of step ``step``, with half of it handed over."""

    def __init__(self, step: int, error: Exception) -> None:
        super().__init__()
        self.step, self.error = step, error
        self.failed = False

    def stream(self, samples: Any, sampling: Any, step: int, partial: Any = None) -> Iterator[Any]:
        for count, responses in enumerate(super().stream(samples, sampling, step, partial)):
            if step == self.step and count == 2 and not self.failed:
                self.failed = True
                raise self.error
            yield responses


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_batch_whose_engine_failed_is_generated_anew(staleness: int) -> None:
    """By the weights that the engine has got since; nothing is lost, nothing is trained on twice."""
    ahead = ahead_of(staleness=staleness, engine=Failing(5, EngineError("killed")))
    batches = run(ahead)
    assert ahead.sampler.engine.failed
    newest = [
        {step - s.response.weights_version for s in batch} for step, batch in enumerate(batches)
    ]
    if not staleness:
        assert [max(one) for one in newest] == [0, 1, 1, 1, 0, *[1] * (STEPS - 5)]
        assert numbers(batches) == [number for number in range(STEPS * PROMPTS) for _ in range(4)]
    assert set(Counter(numbers(batches)).values()) == {4}


def test_what_ends_a_rollout_on_one_rank_ends_the_wait() -> None:
    """The other ranks would wait for this one in the next collective."""
    ahead = ahead_of(engine=Failing(3, UserError("a judge that cannot work")))
    with pytest.raises(UserError, match="a judge that cannot work"):
        run(ahead)


def test_a_signal_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = ahead_of(engine=Failing(3, RolloutAbandoned()))
    real = ahead.sampler.engine
    monkeypatch.setattr(signals, "stop_requested", lambda: 15 if real.failed else None)
    with pytest.raises(RolloutAbandoned):
        run(ahead)
    assert ahead.sampler.consumed_prompts(2) == 2 * PROMPTS


def test_a_run_that_ends_gives_up_what_is_on_its_way() -> None:
    closed, handed_over = threading.Event(), []

    class Waiting(Clockwork):
        def stream(
            self, samples: Any, sampling: Any, step: int, partial: Any = None
        ) -> Iterator[Any]:
            for responses in super().stream(samples, sampling, step, partial):
                assert step == 1 or closed.wait(20)
                handed_over.append(step)
                yield responses

    ahead = ahead_of(engine=Waiting())
    ahead.take(1)
    ahead.start(2)
    ahead.close()
    closed.set()
    assert ahead.batch is not None
    assert isinstance(ahead.batch.exception(timeout=20), CancelledError)
    assert handed_over.count(2) == 1


class Updated(Clockwork):
    """Gets the weights ``to`` when a response of step 2 has been handed over."""

    def __init__(self, to: int) -> None:
        super().__init__()
        self.to, self.begun, self.has_them = to, threading.Event(), threading.Event()

    def stream(self, samples: Any, sampling: Any, step: int, partial: Any = None) -> Iterator[Any]:
        for responses in super().stream(samples, sampling, step, partial):
            yield responses
            if step == 2:
                self.begun.set()
                assert self.has_them.wait(20)
                self.weights_version = self.to


def test_new_weights_within_a_batch_are_of_the_policy_that_trains_on_it() -> None:
    ahead = ahead_of(kind=Immediate, engine=Updated(to=1))
    engine: Any = ahead.sampler.engine
    ahead.take(1)
    ahead.start(2)
    assert engine.begun.wait(20)
    ahead.wait()
    assert ahead.batch is not None
    assert not ahead.batch.done(), "new weights do not wait for the batch"
    engine.has_them.set()
    ahead.complete()
    busy = ahead.sampler.timers.seconds["rollout_busy"]
    ahead.complete()
    assert ahead.sampler.timers.seconds["rollout_busy"] == busy > 0, "counted once"
    behind = [1 - sample.response.weights_version for sample in ahead.take(2)]
    assert set(behind) == {0, 1}
    mean = sum(behind) / len(behind)
    assert ahead.sampler.metrics == {"rollout/staleness_mean": mean, "rollout/staleness_max": 1}


@pytest.mark.parametrize(("kind", "to"), [(Ahead, 1), (Immediate, 2), (Immediate, -1)])
def test_other_weights_within_a_batch_are_refused(kind: type[Ahead], to: int) -> None:
    ahead = ahead_of(kind=kind, engine=Updated(to))
    engine: Any = ahead.sampler.engine
    ahead.take(1)
    ahead.start(2)
    engine.has_them.set()
    with pytest.raises(UserError, match=f"was sampled by weights version {to}, the policy is at"):
        ahead.complete()


def test_a_run_that_a_signal_ends_waits_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the other ranks end together with this one's."""
    ahead = ahead_of(kind=Immediate, engine=Updated(to=1))
    engine: Any = ahead.sampler.engine
    ahead.take(1)
    ahead.start(2)
    assert engine.begun.wait(20)
    monkeypatch.setattr(signals, "stop_requested", lambda: 15)
    threading.Timer(0.1, engine.has_them.set).start()
    ahead.close(Stopped, Stopped("by a signal", 75), None)
    assert ahead.batch is not None
    assert isinstance(ahead.batch.exception(timeout=0), RolloutAbandoned)


def test_new_weights_within_a_batch_need_generation_beside_training() -> None:
    with pytest.raises(
        UserError, match=r"rollout\.async_update=immediate needs rollout\.async_steps=1"
    ):
        load_config(QUICKSTART / "dcpo.yaml", ["rollout.async_update=immediate"])


def test_older_weights_than_allowed_are_refused() -> None:
    ahead = ahead_of()
    ahead.sampler.engine.weights_version = 0
    ahead.take(1)
    ahead.sampler.behind = range(1, 2)
    with pytest.raises(UserError, match="was sampled by weights version 0"):
        ahead.sampler.sample(3)
