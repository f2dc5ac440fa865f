"""Sessions that fail, and responses that no verdict could be made of, are left out of their groups,
and groups of one are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.errors import UserError
from megatron_dcpo.objectives import build_method
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.sampler import (
    PromptGroup,
    Sampler,
    SamplerState,
    _session_metrics,
    _with_sampled,
)
from megatron_dcpo.types import Judgement, Prompt, Response
from tests.helpers.paths import QUICKSTART

PROMPT = Prompt("p", (), (1,), "", "t")


def response(index: int, failure: str | None = None) -> Response:
    ids = np.zeros(0 if failure else 3, np.int64)
    counted = None if failure else {"agent_calls": float(index), "segments": 1.0}
    return Response(
        "p", index, ids, np.zeros(len(ids), np.float32), "stop", 0, failure=failure, counted=counted
    )


def judgement() -> Judgement:
    return Judgement("p", 1.0, 0.5, "ok", boundary=2, length=3)


def sampled(*failing: int, size: int = 4) -> PromptGroup:
    group = PromptGroup(prompt=PROMPT, position=0, step=1, size=size)
    results: dict[int, Any] = {}
    for index in range(size):
        if index in failing:
            results[index] = response(index, "it hung"), None
        else:
            results[index] = response(index), judgement()
    return _with_sampled(group, results)


def test_a_failed_session_is_neither_missing_nor_a_response() -> None:
    group = sampled(1)
    assert group.unfinished == []
    assert group.failed == {1}
    assert [sample.response.sample_index for sample in group.samples] == [0, 2, 3]
    assert not group.is_lost


@pytest.mark.parametrize(("failing", "is_lost"), [((0, 1), False), ((0, 1, 2), True)])
def test_a_group_of_one_is_lost(failing: tuple[int, ...], is_lost: bool) -> None:
    """An advantage is relative to others."""
    assert sampled(*failing).is_lost == is_lost


def test_metrics_are_means_over_the_sessions_that_did_not_fail() -> None:
    drawn: Any = type("Drawn", (), {"finished": [sampled(1), sampled(0, 3)]})
    assert _session_metrics(drawn) == {
        "rollout/agent_calls": np.mean([0, 2, 3, 1, 2]),
        "rollout/segments": 1.0,
    }


def test_a_lost_group_is_replaced_by_the_next_prompt() -> None:
    """One of two groups is lost: a third prompt is drawn in the same step."""
    sampler = sampler_of({"p0"}, {0, 1, 2}, 0.5)
    batch, state = sampler.sample(sampler.start, step=1, versions=range(1))
    assert {sample.prompt.prompt_id for sample in batch.samples} == {"p1", "p2"}
    assert len(batch.samples) == 8
    assert batch.metrics["rollout/unjudged"] == 3 / 12
    assert state.position == 3


def test_some_failures_leave_smaller_groups() -> None:
    sampler = sampler_of({"p0", "p1"}, {3}, 0.5)
    batch, _ = sampler.sample(sampler.start, step=1, versions=range(1))
    assert [sample.response.sample_index for sample in batch.samples] == [0, 1, 2] * 2
    assert batch.metrics["rollout/unjudged"] == 0.25
    assert batch.scores is not None
    assert batch.scores.shape == (5, 6)


def test_too_many_failures_are_an_error() -> None:
    sampler = sampler_of({"p0", "p1"}, {3}, 0.2)
    with pytest.raises(UserError, match=r"judging\.max_error_rate"):
        sampler.sample(sampler.start, step=1, versions=range(1))


def test_a_flaky_verifiers_step_is_that_of_the_groups_without_those_responses() -> None:
    """Bit for bit: what is not judged is in no group, no statistic and no total."""
    steps = []
    for is_flaky in (False, True):
        sampler = sampler_of({"p0", "p1"}, {3}, 0.5, is_flaky=is_flaky)
        batch, state = sampler.sample(sampler.start, step=1, versions=range(1))
        rows = [(one.prompt.prompt_id, one.judgement) for one in batch.samples]
        steps.append((rows, batch.scores.tolist(), batch.metrics, state))
    assert steps[0] == steps[1]


def sampler_of(bad: set[str], failing: set[int], rate: float, is_flaky: bool = False) -> Any:
    """A sampler of two groups of four, whose engine and judge are functions. What fails is the
    session, or the verifier if it ``is_flaky``.
    """
    config = load_config(
        QUICKSTART / "dcpo.yaml",
        ["data.prompts_per_step=2", "rollout.group_size=4", "rollout.agent=a.py:run"],
    )
    config = replace(config, judging=replace(config.judging, max_error_rate=rate))

    def stream(samples: Any, *_: Any) -> Iterator[list[Response]]:
        for prompt, index in samples:
            fails = not is_flaky and prompt.prompt_id in bad and index in failing
            one = response(index, "it hung" if fails else None)
            yield [replace(one, prompt_id=prompt.prompt_id)]

    def judge(responses: Any, prompts: Any) -> list[Judgement | None]:
        return [
            None
            if one.prompt_id in bad and one.sample_index in failing
            else replace(judgement(), prompt_id=one.prompt_id, correct=float(one.sample_index % 2))
            for one in responses
        ]

    collectives = SimpleNamespace(rank=0, max=max_of, gather=lambda value: [value])
    share = SimpleNamespace(ranks=1, engine=0, engines=1, rank_in_engine=0)
    generation: Any = SimpleNamespace(
        engine=SimpleNamespace(slot_steps=None),
        collectives=collectives,
        share=share,
        stream=stream,
    )

    def draw(position: int, count: int) -> list[Prompt]:
        return [replace(PROMPT, prompt_id=f"p{position + n}") for n in range(count)]

    made: Any = Sampler(
        draw=draw,
        generation=generation,
        judge=judge,
        method=build_method(config.objective),
        timers=Timers(None),
        config=config,
    )
    made.start = SamplerState()
    return made


def max_of(value: int) -> int:
    return value
