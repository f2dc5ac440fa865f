"""Several servers: every rank asks its own, all of them get the weights, and one that was away is
waited for. The servers are those of the quickstart, in threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout import vllm_server
from megatron_dcpo.rollout.engine import EngineError, SamplingConfig
from megatron_dcpo.rollout.vllm_server import ServerEngine
from megatron_dcpo.types import Prompt
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import hf_shapes
from tests.helpers.engine_server import Served
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import without_others

POLICY = QUICKSTART / "policy"
PROMPTS = [Prompt(name, (), ids, "5", "") for name, ids in (("p", (1, 2)), ("q", (3,)))]
SAMPLING = SamplingConfig(n=2, max_tokens=6, seed=3)


@pytest.fixture
def servers() -> Iterator[tuple[Served, Served]]:
    with Served(together=1) as first, Served(together=1) as second:
        yield first, second


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    without_others(monkeypatch)


def engine_of(rank: int, directory: Path, *servers: Served) -> ServerEngine:
    endpoints = [server.endpoint for server in servers]
    return ServerEngine(endpoints, POLICY, directory, rank=rank)


def changed_weights() -> list[list[WeightSlice]]:
    """The policy with a norm of twice the weight, a tensor a bucket."""
    reader = HFReader(POLICY)
    buckets = []
    for name in hf_shapes(read_architecture(POLICY)):
        tensor = reader.tensor(name)
        if name == "model.norm.weight":
            tensor = 2 * tensor
        buckets.append([WeightSlice(name, 0, 0, tensor)])
    return buckets


def sampled(engine: ServerEngine) -> list[tuple[Any, ...]]:
    responses = engine.generate(PROMPTS, SAMPLING, step=1)
    return [
        (one.key, one.token_ids.tolist(), np.float64(one.logprobs).tolist()) for one in responses
    ]


def test_each_rank_asks_its_own_and_both_answer_alike(
    servers: tuple[Served, Served], tmp_path: Path
) -> None:
    answers = []
    for rank, (asked, idle) in enumerate([servers, servers[::-1], servers]):
        before = len(asked.engine.sampled), len(idle.engine.sampled)
        answers.append(sampled(engine_of(rank, tmp_path, *servers)))
        after = len(asked.engine.sampled), len(idle.engine.sampled)
        assert after == (before[0] + 4, before[1])
    assert answers[0] == answers[1] == answers[2]


def test_both_get_an_update_and_one_alone_is_not_enough(
    servers: tuple[Served, Served], tmp_path: Path
) -> None:
    engines = [engine_of(rank, tmp_path, *servers) for rank in (0, 1)]
    before = sampled(engines[0])
    engines[0].update_weights(changed_weights(), 1)
    engines[1].weights_version = 1  # its rank hands over nothing
    after = [sampled(engine) for engine in engines]
    assert after[0] == after[1] != before
    for server in servers:
        assert server.engine.sampled[-1][0] == "1"
    servers[1].http.version = "0"
    assert sampled(engines[0]) == after[0]
    with pytest.raises(EngineError, match=engines[1].server.url):
        sampled(engines[1])


def test_a_server_that_is_started_again_is_waited_for(
    servers: tuple[Served, Served], tmp_path: Path
) -> None:
    engine = engine_of(1, tmp_path, *servers)
    engine.update_weights(changed_weights(), 1)
    undisturbed = sampled(engine)
    servers[1].engine.fails_with = "1"
    servers[1].engine.failing = lambda: servers[1].start_again(1.0)
    with pytest.raises(EngineError, match=engine.server.url):
        sampled(engine)
    engine.restart()
    assert engine.weights_version == 0
    engine.update_weights(changed_weights(), 1)
    assert [server.http.version for server in servers] == ["1", "1"]
    assert sampled(engine) == undisturbed


def test_one_that_does_not_come_back_is_named(
    servers: tuple[Served, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(0, tmp_path, *servers)
    monkeypatch.setattr(vllm_server, "RETURN_SECONDS", 0.0)
    servers[1].start_again(600.0)
    with pytest.raises(UserError, match=engine.servers[1].url):
        engine.restart()
