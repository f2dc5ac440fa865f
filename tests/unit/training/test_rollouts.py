"""``rollout.max_staleness`` with a server: the same batches, sampled while the one before trains,
none lost and none trained on twice.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import Stopped, UserError
from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.generation import Generation
from megatron_dcpo.training.loop import MAX_RESTARTS, with_restarts
from megatron_dcpo.training.rollouts import AsyncRollouts, RolloutsInTurn, SavedRollouts
from megatron_dcpo.training.sampler import Sampler, SamplerState
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import (
    Clockwork,
    Steps,
    length_of,
    number_of,
    numbered_sampler,
    one_rank,
    unwatched,
)

STEPS, PROMPTS = 12, 8
SERVER = (
    "rollout.engine=server",
    "rollout.endpoint=http://here/v1",
    "objective.tis_level=token",
    "rollout.max_staleness=1",
    f"data.prompts_per_step={PROMPTS}",
    "data.shuffle=false",
    "rollout.group_size=4",
)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def sampler_of_server(
    trains: Any = lambda number: True,
    engine: Any = None,
    filtered: bool = False,
) -> Sampler:
    """A sampler of 1,000 prompts."""
    config = load_config(
        QUICKSTART / "grpo.yaml", [*SERVER, f"rollout.filter_groups={str(filtered).lower()}"]
    )
    return numbered_sampler(
        trains, 1000, config=config, engine=engine or Clockwork(), timers=Timers(None)
    )


def asynchronous(sampler: Sampler | None = None) -> AsyncRollouts:
    return AsyncRollouts(
        sampler=sampler or sampler_of_server(), timers=unwatched(), last_step=STEPS
    )


class Restarted:
    """The parts of a run that :func:`with_restarts` needs; notes what it asks of them."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.policy = SimpleNamespace(topology=SimpleNamespace(rank=0))
        self.engine = SimpleNamespace(restart=lambda: self.asked.append("restart"))
        self.weight_sync = SimpleNamespace(push=self.asked.append)


def run(rollouts: AsyncRollouts, first: int = 1, last: int = STEPS) -> list[list[Any]]:
    """The loop: the engine has the weights ``step - 1`` when a step begins."""
    batches = []
    for step in range(first, last + 1):
        rollouts.sampler.engine.weights_version = step - 1
        parts: Any = Restarted()
        batch = with_restarts(parts, partial(rollouts.take, step), version=step - 1)
        batches.append(batch.samples)
        rollouts.start(step + 1)
        state = rollouts.state  # what a checkpoint holds, whatever is on its way
        rollouts.wait_for_engine()
        assert rollouts.state is state
    return batches


def numbers(batches: list[list[Any]]) -> list[int]:
    return [number_of(sample.prompt.prompt_id) for batch in batches for sample in batch]


def test_every_batch_but_the_first_is_one_update_behind() -> None:
    rollouts = asynchronous()
    metrics = []
    for step in range(1, STEPS + 1):
        rollouts.sampler.engine.weights_version = step - 1
        batch = rollouts.take(step)
        behind = {step - 1 - sample.response.weights_version for sample in batch.samples}
        assert behind == {0 if step == 1 else 1}
        assert numbers([batch.samples]) == [
            number for number in range(PROMPTS * (step - 1), PROMPTS * step) for _ in range(4)
        ]
        metrics.append(batch.metrics)
        rollouts.start(step + 1)
        rollouts.wait_for_engine()
    assert metrics[-1]["rollout/staleness_mean"] == metrics[-1]["rollout/staleness_max"] == 1
    assert rollouts.future is None, "nothing is sampled after the last step"


def test_filters_draw_as_one_after_the_other() -> None:
    """What is drawn and filtered depends on the clockwork alone."""
    rollouts = asynchronous(sampler_of_server(lambda n: n % 3 > 0, filtered=True))
    in_turn = Steps(sampler_of_server(lambda n: n % 3 > 0, filtered=True))
    batches = run(rollouts)
    reference = [in_turn.take(step) for step in range(1, STEPS + 1)]
    assert numbers(batches) == numbers(reference)
    assert max(Counter(numbers(batches)).values()) == 4
    assert rollouts.state.position == in_turn.state.position > STEPS * PROMPTS


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


def test_a_batch_whose_engine_failed_is_generated_again() -> None:
    """By the weights that the engine has got since; nothing is lost, nothing is trained on
    twice.
    """
    engine = Failing(5, EngineError("killed"))
    batches = run(asynchronous(sampler_of_server(engine=engine)))
    assert engine.failed
    newest = [
        {step - s.response.weights_version for s in batch} for step, batch in enumerate(batches)
    ]
    assert [max(one) for one in newest] == [0, 1, 1, 1, 0, *[1] * (STEPS - 5)]
    assert numbers(batches) == [number for number in range(STEPS * PROMPTS) for _ in range(4)]
    assert set(Counter(numbers(batches)).values()) == {4}


def test_an_engine_that_fails_again_and_again_ends_the_run() -> None:
    """It is restarted twice and gets the weights of the step before; then the run ends."""

    class Dead(Clockwork):
        def stream(self, samples: Any, sampling: Any, step: int, partial: Any = None) -> Any:
            raise EngineError("dead")
            yield

    rollouts = asynchronous(sampler_of_server(engine=Dead()))
    parts: Any = Restarted()
    with pytest.raises(UserError, match="dead"):
        with_restarts(parts, partial(rollouts.take, 4), version=3)
    assert parts.asked == ["restart", 3] * MAX_RESTARTS


def test_what_ends_a_rollout_on_one_rank_ends_the_wait() -> None:
    """The other ranks would wait for this one in the next collective."""
    engine = Failing(3, UserError("a judge that cannot work"))
    with pytest.raises(UserError, match="a judge that cannot work"):
        run(asynchronous(sampler_of_server(engine=engine)))


def test_a_signal_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Failing(3, RolloutAbandoned())
    rollouts = asynchronous(sampler_of_server(engine=engine))
    monkeypatch.setattr(signals, "stop_requested", lambda: 15 if engine.failed else None)
    with pytest.raises(RolloutAbandoned):
        run(rollouts)
    assert rollouts.state.position == 2 * PROMPTS


class Waiting(Clockwork):
    """Waits in the batch of step 2 until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on, self.begun = threading.Event(), threading.Event()
        self.handed_over: list[int] = []

    def stream(self, samples: Any, sampling: Any, step: int, partial: Any = None) -> Iterator[Any]:
        for responses in super().stream(samples, sampling, step, partial):
            self.begun.set()
            assert step == 1 or self.go_on.wait(20)
            self.handed_over.append(step)
            yield responses


def test_a_run_that_ends_gives_up_what_is_on_its_way() -> None:
    engine = Waiting()
    rollouts = asynchronous(sampler_of_server(engine=engine))
    rollouts.take(1)
    rollouts.start(2)
    rollouts.close()
    engine.go_on.set()
    assert rollouts.future is not None
    assert isinstance(rollouts.future.exception(timeout=20), CancelledError)
    assert engine.handed_over.count(2) == 1


def test_a_run_that_a_signal_ends_waits_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of the other ranks end together with this one's."""
    engine = Waiting()
    rollouts = asynchronous(sampler_of_server(engine=engine))
    rollouts.take(1)
    engine.begun.clear()
    rollouts.start(2)
    assert engine.begun.wait(20)
    monkeypatch.setattr(signals, "stop_requested", lambda: 15)
    threading.Timer(0.1, engine.go_on.set).start()
    rollouts.close(Stopped, Stopped("by a signal", 75), None)
    assert rollouts.future is not None
    assert isinstance(rollouts.future.exception(timeout=0), RolloutAbandoned)


def test_the_time_of_a_batch_on_its_way_counts_once() -> None:
    rollouts = asynchronous()
    rollouts.take(1)
    rollouts.timers.clear()
    rollouts.start(2)
    rollouts.wait_for_engine()
    busy = rollouts.timers.seconds["rollout_busy"]
    rollouts.wait_for_engine()
    assert rollouts.timers.seconds["rollout_busy"] == busy > 0


@pytest.mark.parametrize("version", [1, 4])
def test_responses_of_other_weights_are_refused(version: int) -> None:
    """Step 4 takes what the weights after step 2 have begun, and those after step 3 completed."""
    rollouts = asynchronous()
    rollouts.sampler.engine.weights_version = version
    with pytest.raises(UserError, match=f"sampled by weights version {version}, the engine should"):
        rollouts.sampler.sample(SamplerState(), step=4, versions=range(2, 4))
    rollouts.sampler.engine.weights_version = 3
    rollouts.sampler.sample(SamplerState(), step=4, versions=range(2, 4))


def test_age_is_counted_in_optimizer_updates() -> None:
    """The engines get weights after four updates, so that a token is four updates old, or none."""
    updates = ["training.updates_per_rollout=4", "rollout.max_staleness=7"]
    config = load_config(QUICKSTART / "grpo.yaml", [*SERVER, *updates])
    assert config.rollouts_behind == 1
    sampler = numbered_sampler(
        lambda number: True, 1000, config=config, engine=Clockwork(), timers=Timers(None)
    )
    sampler.engine.weights_version = 2
    batch, _ = sampler.sample(SamplerState(), step=4, versions=range(2, 4))
    assert batch.metrics["rollout/staleness_max"] == 4


@pytest.mark.parametrize(
    ("options", "behind"),
    [
        (("rollout.engine=server", "rollout.endpoint=http://here/v1"), 1),
        (("rollout.oversample=1.5",), 3),
    ],
)
def test_a_bound_below_the_updates_of_a_rollout_is_refused(
    options: tuple[str, ...], behind: int
) -> None:
    updates = ("training.updates_per_rollout=2", "objective.tis_level=token", *options)
    with pytest.raises(UserError, match=r"training\.updates_per_rollout"):
        load_config(QUICKSTART / "grpo.yaml", ["rollout.max_staleness=1", *updates])
    config = load_config(QUICKSTART / "grpo.yaml", ["rollout.max_staleness=7", *updates])
    assert config.rollouts_behind == behind


# ------------------------------------------------------------------------------------ checkpoints
STALE = ("rollout.max_staleness=2", "rollout.oversample=1.5", "objective.tis_level=token")


def in_turn(*overrides: str) -> RolloutsInTurn:
    options = ["data.prompts_per_step=6", "rollout.group_size=3", *STALE, *overrides]
    return RolloutsInTurn(numbered_sampler(lambda number: True, 1000, *options))


def take(rollouts: RolloutsInTurn, step: int) -> list[tuple[str, int, list[int]]]:
    rollouts.sampler.engine.weights_version = step - 1
    samples = rollouts.take(step).samples
    return [(*sample.response.key, sample.response.token_ids.tolist()) for sample in samples]


def test_a_resumed_run_takes_the_same_batches() -> None:
    whole, begun, resumed = in_turn(), in_turn(), in_turn()
    expected = [take(whole, step) for step in range(1, 9)]
    for step in range(1, 5):
        take(begun, step)
    saved = SavedRollouts(begun).state_dict()
    assert saved["carried"], "the test is about what is carried"
    SavedRollouts(resumed).load_state_dict(saved, step=4)
    assert [take(resumed, step) for step in range(5, 9)] == expected[4:]


@pytest.mark.parametrize(
    ("overrides", "option"),
    [
        (("rollout.group_size=4",), "rollout.group_size"),
        (("rollout.max_staleness=1",), "rollout.max_staleness"),
        (("rollout.max_response_length=1",), "rollout.max_response_length"),
    ],
)
def test_options_that_do_not_allow_what_is_carried_are_named(
    overrides: tuple[str, ...], option: str
) -> None:
    begun = in_turn()
    saved: dict[str, Any] = {}
    for step in range(1, 9):
        take(begun, step)
        saved = SavedRollouts(begun).state_dict()
        responses = [r for group in begun.state.carried for r, _ in group.responses.values()]
        if max((step - r.oldest_version for r in responses), default=0) == 2:
            break
    else:
        raise AssertionError("no response got as old as allowed")
    assert max(length_of(r.prompt_id, r.sample_index) for r in responses) > 1
    with pytest.raises(UserError, match=option):
        SavedRollouts(in_turn(*overrides)).load_state_dict(saved, step=step)


def test_a_checkpoint_that_contradicts_itself_is_refused() -> None:
    saved = {"consumed_prompts": 11, "carried": [], "group_size": 3}
    with pytest.raises(UserError, match="step 2"):
        SavedRollouts(in_turn()).load_state_dict(saved, step=2)


def test_generation_knows_its_share_of_a_rollout() -> None:
    """Ranks of one engine are neighbors: rank 5 of 8, two a engine, is second in the third."""

    class OfEight:
        rank, ranks = 5, range(8)

    engine: Any = Clockwork()
    engine.tensor_model_parallel_size = 2
    collectives: Any = OfEight()
    watch: Any = None
    share = Generation(engine, collectives, watch).share
    assert (share.engine, share.engines, share.rank_in_engine, share.ranks) == (2, 4, 1, 2)
