"""The embedded engine takes calls while it runs; what one gets does not depend on the others."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import pytest

from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.types import Prompt, Response, ResponseKey
from tests.helpers.paths import EXAMPLES

SAMPLING = SamplingConfig(max_tokens=24, seed=5)


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    return TransformersEngine.from_pretrained(EXAMPLES / "quickstart" / "policy", max_num_seqs=4)


def prompt(number: int) -> Prompt:
    ids = np.random.default_rng(number).integers(3, 13, size=3 + number % 5)
    return Prompt(f"p{number}", (), tuple(ids.tolist()), "", "t")


def served(
    engine: TransformersEngine, calls: list[EngineCall], at_once: int, delays: random.Random
) -> Mapping[ResponseKey, Response]:
    """Serve calls that arrive a few at a time."""
    arrivals = Arrivals()
    waiting = list(calls)
    got: dict[ResponseKey, Response] = {}
    arrivals.put(*waiting[:at_once])
    del waiting[:at_once]
    for together in engine.serve(arrivals, SAMPLING, step=2):
        got.update({response.key: response for response in together})
        if waiting and delays.random() < 0.3:
            arrivals.put(waiting.pop())
        if not waiting and len(got) == len(calls):
            arrivals.close()
    return got


def test_calls_that_arrive_get_what_the_stream_gives(engine: TransformersEngine) -> None:
    """With 4 slots for 11 calls, in three orders: the same tokens as all at once."""
    samples = [(prompt(number), number % 2) for number in range(11)]
    expected = {
        response.key: response
        for together in engine.stream(samples, SAMPLING, step=2)
        for response in together
    }
    for seed in range(3):
        calls = [EngineCall(one, index, SAMPLING.max_tokens) for one, index in samples]
        random.Random(seed).shuffle(calls)
        got = served(engine, calls, at_once=1 + seed, delays=random.Random(seed))
        assert got.keys() == expected.keys()
        for key, response in got.items():
            assert response.token_ids.tolist() == expected[key].token_ids.tolist()
            np.testing.assert_allclose(response.logprobs, expected[key].logprobs, atol=1e-4)
            assert response.finish_reason == expected[key].finish_reason


def test_a_call_has_limits_of_its_own(engine: TransformersEngine) -> None:
    one = prompt(1)
    (whole,) = served(engine, [EngineCall(one, 0, 24)], 1, random.Random(0)).values()
    (short,) = served(engine, [EngineCall(one, 0, 3)], 1, random.Random(0)).values()
    assert short.token_ids.tolist() == whole.token_ids[:3].tolist()
    assert short.finish_reason == "length"
    told: list[int] = []

    def ends(token: int) -> bool:
        told.append(token)
        return len(told) == 5

    (stopped,) = served(engine, [EngineCall(one, 0, 24, ends)], 1, random.Random(0)).values()
    assert told == stopped.token_ids.tolist() == whole.token_ids[:5].tolist()
    assert stopped.finish_reason == "stop"


def test_a_call_that_is_cancelled_gets_nothing_and_frees_its_slot(
    engine: TransformersEngine,
) -> None:
    arrivals = Arrivals()
    calls = [EngineCall(prompt(number), 0, 24) for number in range(6)]
    arrivals.put(*calls)
    arrivals.cancel(calls[5].key)  # that waits
    got = []
    for number, together in enumerate(engine.serve(arrivals, SAMPLING, step=2)):
        got += [response.prompt_id for response in together]
        if number == 0:
            arrivals.cancel(calls[0].key)  # that runs
        if len(got) == 4:
            arrivals.close()
    assert sorted(got) == ["p1", "p2", "p3", "p4"]


def test_an_engine_that_waits_looks_around(engine: TransformersEngine) -> None:
    arrivals = Arrivals()
    served = engine.serve(arrivals, SAMPLING)
    assert next(served) == []
    arrivals.close()
    assert list(served) == []
