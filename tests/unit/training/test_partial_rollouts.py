"""``rollout.max_staleness``: what a rollout leaves unfinished is continued, in time and once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.training.rollouts import restored_groups, saved_groups
from megatron_dcpo.training.sampler import (
    GroupNeed,
    PromptGroup,
    _check_versions,
    batch_is_complete,
)
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import Steps, length_of, number_of, numbered_sampler, one_rank


@pytest.fixture(autouse=True, scope="module")
def _group_of_one() -> Iterator[None]:
    with one_rank():
        yield


STALE = ("rollout.max_staleness=1", "rollout.oversample=1.5", "objective.tis_level=token")


def stale_run(*overrides: str) -> Any:
    settings = [
        "data.prompts_per_step=6",
        "rollout.group_size=3",
        "objective.tis_level=token",
        *overrides,
    ]
    return Steps(numbered_sampler(lambda number: number % 3 > 0, 1000, *settings))


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("oversample", [1.3, 2.0])
@pytest.mark.parametrize("groups", ["none", "reasoning", "any"])
def test_every_group_is_trained_on_once_and_in_time(
    staleness: int, oversample: float, groups: str
) -> None:
    options = [f"rollout.max_staleness={staleness}", f"rollout.oversample={oversample}"]
    run = stale_run(*options, f"rollout.filter_groups={groups}", "data.shuffle=false")
    trained: list[str] = []
    oldest = 0
    for step in range(1, 31):
        samples = run.take(step)
        batch = list(dict.fromkeys(sample.prompt.prompt_id for sample in samples))
        with_signal = [name for name in batch if number_of(name) % 3 > 0]
        assert len(batch if groups != "reasoning" else with_signal) == 6
        assert [s.response.sample_index for s in samples] == [0, 1, 2] * len(batch)
        for sample in samples:
            response = sample.response
            assert len(response.token_ids) == length_of(response.prompt_id, response.sample_index)
            assert response.token_ids.tolist() == list(range(len(response.token_ids))), (
                "a token was lost or is there twice"
            )
            assert sum(n for _, n in response.segments or ((0, len(response.token_ids)),)) == len(
                response.token_ids
            )
            assert step - 1 - response.oldest_version <= staleness
            oldest = max(oldest, step - 1 - response.oldest_version)
        assert oldest >= run.metrics["rollout/staleness_max"]
        trained += batch
        carried = {group.prompt.prompt_id for group in run.state.carried}
        drawn = [f"{n}@0" for n in range(run.state.position)]
        kept = [
            name for name in drawn if groups != "any" or number_of(name) % 3 > 0 or name in carried
        ]
        assert sorted([*trained, *carried]) == sorted(kept), "a prompt was lost or is there twice"
        assert len(run.state.carried) <= round(6 * (oversample - 1) + 0.5)
    assert run.state.totals.informative_groups == sum(number_of(name) % 3 > 0 for name in trained)
    judged = 3 * len(trained) + sum(len(group.samples) for group in run.state.carried)
    if groups != "any":  # nothing was left out
        assert run.state.totals.responses == judged
    assert oldest == staleness if staleness == 1 else oldest > 0


def test_longer_staleness_waits_less() -> None:
    """With the bound at work, a step lasts until the oldest response has ended."""
    means = []
    for staleness in (1, 3):
        run = stale_run(f"rollout.max_staleness={staleness}", "rollout.oversample=1.5")
        stale = []
        for step in range(1, 21):
            run.take(step)
            stale.append(run.metrics["rollout/staleness_max"])
        means.append(np.mean(stale))
    assert means[1] > means[0]


def test_with_none_the_batch_is_what_it_always_was() -> None:
    """Every prompt in the order of the data, every response by one version, nothing carried, no
    metric of it.
    """
    run = stale_run("data.shuffle=false")
    for step in (1, 2):
        samples = run.take(step)
        expected = [(f"{n}@0", i) for n in range(6 * step - 6, 6 * step) for i in range(3)]
        assert [(s.response.prompt_id, s.response.sample_index) for s in samples] == expected
        assert {(s.response.weights_version, s.response.segments) for s in samples} == {
            (step - 1, ())
        }
    assert [len(asked) for asked in run.sampler.engine.asked] == [18, 18]
    assert (run.state.position, run.state.carried) == (12, ())
    assert not any("stale" in name or "carried" in name for name in run.metrics)


def test_too_old_or_too_new_responses_are_refused() -> None:
    response = Response(
        "p", 0, np.arange(3), np.zeros(3, np.float32), "stop", 5, segments=((3, 2), (5, 1))
    )
    _check_versions([response], range(5, 6), oldest=3)
    for version, oldest, refused in ((5, 4, 3), (6, 3, 5), (4, 2, 5)):
        with pytest.raises(
            UserError, match=f"response to p was sampled by weights version {refused},"
        ):
            _check_versions([response], range(version, version + 1), oldest)


def test_groups_come_back_from_a_checkpoint_as_they_were() -> None:
    prompt = Prompt("p@0", (), (1,), "1", "t")
    whole = Response(
        "p@0",
        0,
        np.arange(3),
        np.zeros(3, np.float32),
        "stop",
        4,
        step=4,
        segments=((3, 2), (4, 1)),
    )
    part = dataclasses.replace(whole, sample_index=1, finish_reason="abort")
    judgement = Judgement("p@0", float(np.float64(1)), None, "missing", 2, 3, answer="7")
    group = PromptGroup(prompt, 17, 4, 3, {0: (whole, judgement), 1: (part, None)})
    (back,) = restored_groups(
        saved_groups([group]), lambda position, count: [{17: prompt}[position]], 3
    )
    assert (back.position, back.step, back.unfinished) == (17, 4, [1, 2])
    assert back.responses[0][1] == judgement
    for index, (response, _) in group.responses.items():
        ours, theirs = (dataclasses.asdict(back.responses[index][0]), dataclasses.asdict(response))
        assert all(
            np.array_equal(ours.pop(name), theirs.pop(name)) for name in ("token_ids", "logprobs")
        )
        assert ours == theirs
    saved = saved_groups([group])
    saved[0]["responses"][0][0]["logprobs"] = saved[0]["responses"][0][0]["logprobs"][:2]
    with pytest.raises(ValueError, match="p@0"):
        restored_groups(saved, lambda position, count: [prompt], 3)


def test_a_batch_is_complete_when_enough_groups_are_finished_and_none_may_not_wait() -> None:
    done = {("a", 0): None, ("a", 1): None, ("b", 0): None}
    for quota, urgent, complete in ((1, False, True), (2, False, False), (1, True, False)):
        needs = [GroupNeed("a", missing=2, urgent=True), GroupNeed("b", missing=2, urgent=urgent)]
        assert batch_is_complete(needs, quota, done) is complete  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.oversample=1"], "set rollout.oversample above 1, at most 2"),
        (["rollout.oversample=2.5"], "set rollout.oversample above 1, at most 2"),
        (["objective.tis_level=none"], "correct for it with objective.tis_level=token"),
        (
            ["rollout.engine=server", "rollout.endpoint=http://x"],
            "rollout.oversample=1.5 has no effect",
        ),
        (["rollout.logprob_diff_alarm=0.1"], "does not go with rollout.logprob_diff_alarm"),
    ],
)
def test_what_does_not_go_together(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(QUICKSTART / "dcpo.yaml", [*STALE, *overrides])
