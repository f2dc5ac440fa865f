"""Judging overlaps generation, and what the sampler does when the judge or the engine fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.watchdog import Timers
from megatron_dcpo.training.sampler import Sampler, SamplerState, union_length
from megatron_dcpo.types import Judgement, Prompt, Response, TrainingSample
from tests.helpers.samplers import one_rank, sampler_of, unwatched


@pytest.fixture(autouse=True, scope="module")
def _group_of_one() -> Iterator[None]:
    with one_rank():
        yield


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", (), tuple(range(count - i)), "1", "t") for i in range(count)]


def response(prompt: Prompt, index: int) -> Response:
    return Response(prompt.prompt_id, index, np.array([1]), np.zeros(1, np.float32), "stop", 0)


def one_by_one(samples: Any, sampling: Any, step: int) -> Iterator[list[Response]]:
    for prompt, index in samples:
        yield [response(prompt, index)]


def judged(responses: list[Response], by_id: Any) -> list[Judgement]:
    return [Judgement(r.prompt_id, float(r.sample_index), None, "missing", 0, 1) for r in responses]


def sampler_with(judge: Any, stream: Any, timers: Timers | None = None, **parts: Any) -> Sampler:
    """Seven prompts in their order, two responses to each."""
    engine = SimpleNamespace(
        stream=stream, weights_version=0, tensor_model_parallel_size=1, slot_steps=None
    )
    settings = ("rollout.group_size=2", "data.prompts_per_step=7", "data.shuffle=false")
    return sampler_of(
        prompts(7), *settings, engine=engine, judge=judge, timers=timers or unwatched(), **parts
    )


def sample(sampler: Sampler, step: int) -> list[TrainingSample]:
    """The samples of one step, by weights one update older than it."""
    batch, _ = sampler.sample(SamplerState(), step, range(step - 1, step))
    return batch.samples


def number(response: Response) -> tuple[str, int]:
    return response.prompt_id.split("@")[0], response.sample_index


def test_a_response_is_judged_while_the_next_one_is_generated() -> None:
    """Neither can go on without the other: the test would time out if one waited for the end of the
    other. The judge of the first response holds up nobody else's either.
    """
    generating, judging, last = threading.Event(), threading.Event(), threading.Event()

    def stream(samples: Any, sampling: Any, step: int) -> Iterator[list[Response]]:
        for position, (prompt, index) in enumerate(samples):
            if position == 1:
                generating.set()
                assert judging.wait(30), "the first response is not judged meanwhile"
            yield [response(prompt, index)]

    def judge(responses: list[Response], by_id: Any) -> list[Judgement]:
        if number(responses[0]) == ("p0", 0):
            judging.set()
            assert generating.wait(30), "the second response is not generated meanwhile"
            assert last.wait(30), "a slow response holds up the others"
        if number(responses[0]) == ("p6", 1):
            last.set()
        return judged(responses, by_id)

    timers = unwatched()
    samples: list[TrainingSample] = sample(sampler_with(judge, stream, timers), 1)
    assert [number(s.response) for s in samples] == [(f"p{i}", n) for i in range(7) for n in (0, 1)]
    assert [s.judgement.correct for s in samples] == [0.0, 1.0] * 7
    assert timers.seconds["judge_busy"] > 0


def test_a_judge_that_fails_ends_the_rollout_at_once() -> None:
    failed = threading.Event()
    generated = []

    def judge(responses: Any, by_id: Any) -> Any:
        try:
            raise UserError("no sandbox")
        finally:
            failed.set()

    def stream(samples: Any, sampling: Any, step: int) -> Iterator[list[Response]]:
        for prompt, index in samples:
            yield [response(prompt, index)]
            generated.append(index)
            assert failed.wait(30)
            time.sleep(0.2)  # from the exception to the future

    with pytest.raises(UserError, match="no sandbox"):
        sample(sampler_with(judge, stream), 1)
    assert len(generated) < 14
    with pytest.raises(UserError, match="sampled by weights version 0, the engine should have 3"):
        sample(sampler_with(judged, one_by_one), 4)


@pytest.mark.parametrize(
    ("intervals", "length"),
    [([], 0.0), ([(1, 2)], 1.0), ([(1, 3), (2, 4), (6, 7)], 4.0), ([(0, 9), (1, 2), (3, 4)], 9.0)],
)
def test_the_time_of_a_busy_judge_counts_once(
    intervals: list[tuple[float, float]], length: float
) -> None:
    assert union_length(intervals) == length
