"""New weights for a server in the middle of a stream (``rollout.async_update: immediate``): between
two requests.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dcpo.rollout.engine import EngineError, SamplingConfig
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.rollout.vllm_server import ServerEngine
from megatron_dcpo.runtime import distributed
from megatron_dcpo.types import Prompt, Response
from megatron_dcpo.weights.planner import WeightSlice
from tests.helpers.engine_server import Served
from tests.helpers.paths import QUICKSTART

SAMPLING = SamplingConfig(max_tokens=12)
SAMPLES = [(Prompt(f"p{number}", (), (5 + number, 7, 9), "", ""), 0) for number in range(12)]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(distributed, "topology", lambda: SimpleNamespace(rank=0))
    monkeypatch.setattr(distributed, "broadcast_object", lambda value: value)
    monkeypatch.setattr(distributed, "barrier", lambda: None)
    with Served() as served:
        yield served


def weights_of(scale: float) -> Any:
    """The weights of the quickstart's policy with matrices ``scale`` times as large."""
    engine = TransformersEngine.from_pretrained(QUICKSTART / "policy")
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1.0)
    named = dict(engine.model.named_parameters())
    slices = [
        WeightSlice(name, 0, 0, parameter.detach().clone()) for name, parameter in named.items()
    ]
    return engine.model, [slices]


def logprobs_of(model: Any, prompt: Prompt, response: Response) -> np.ndarray:
    ids = torch.tensor([[*prompt.token_ids, *response.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt.token_ids) - 1 : -1].float().log_softmax(-1)
    return logits.gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0].numpy()


def five_before_the_update(server: Served, engine: ServerEngine) -> None:
    """Have the server answer further requests of version 1 only when an update is due."""
    asked, complete = itertools.count(1), server.http.complete

    def answer(body: Any) -> Any:
        number = next(asked)
        while number > 5 and engine.weights_version == 1 and engine.may_send.is_set():
            time.sleep(0.005)
        return complete(body)

    server.http.complete = answer


class Streamed:
    """``engine.stream`` in a thread: its responses so far, and what ended it."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine, self.error = engine, None
        self.responses: list[Response] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for responses in self.engine.stream(SAMPLES, SAMPLING, 2):
                self.responses += responses
        except Exception as error:
            self.error = error

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.responses) < count:
            assert self.thread.is_alive(), self.error
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def end(self) -> dict[str, Response]:
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.error is None
        assert sorted(r.prompt_id for r in self.responses) == sorted(
            prompt.prompt_id for prompt, _ in SAMPLES
        )
        return {response.prompt_id: response for response in self.responses}


def test_the_version_of_a_response_is_that_of_the_weights_that_sampled_it(
    server: Served, tmp_path: Path
) -> None:
    """By its log-probs, which those of the other version are not."""
    models, weights = zip(*(weights_of(scale) for scale in (1.0, 0.5)), strict=True)
    engine = ServerEngine(
        server.options[1].partition("=")[2], QUICKSTART / "policy", tmp_path, concurrency=3
    )
    engine.update_weights(weights[0], 1)
    five_before_the_update(server, engine)
    streamed = Streamed(engine)
    streamed.wait_for(5)
    engine.update_weights(weights[1], 2)
    arrived = len(streamed.responses)
    by_id = streamed.end()
    versions = [response.weights_version for response in streamed.responses]
    assert versions == sorted(versions)
    assert 5 <= versions.count(1) <= 5 + 3, "those that had come, and those under way"
    assert set(versions[:arrived]) == {1}
    for prompt, _ in SAMPLES:
        response = by_id[prompt.prompt_id]
        own, other = (
            logprobs_of(models[v - 1], prompt, response)
            for v in (response.weights_version, 3 - response.weights_version)
        )
        np.testing.assert_allclose(response.logprobs, own, atol=1e-4)
        assert np.abs(response.logprobs - other).max() > 1e-2


def test_nothing_is_sent_before_an_update_has_succeeded(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that dies while its weights are replaced comes back with others; then the update is
    repeated.
    """
    _, buckets = weights_of(1.0)
    engine = ServerEngine(
        server.options[1].partition("=")[2], QUICKSTART / "policy", tmp_path, concurrency=2
    )
    engine.update_weights(buckets, 1)
    five_before_the_update(server, engine)
    streamed = Streamed(engine)
    streamed.wait_for(5)
    reload = server.http.reload

    def dies(body: Any) -> None:
        server.http.version = "0"
        raise RuntimeError("killed while weights are replaced")

    server.http.reload = dies
    with pytest.raises(EngineError, match="killed while weights are replaced"):
        engine.update_weights(buckets, 2)
    engine.restart()
    sampled = len(server.engine.sampled)
    time.sleep(0.2)
    assert len(server.engine.sampled) == sampled < len(SAMPLES)
    server.http.reload = reload
    engine.update_weights(buckets, 2)
    versions = [response.weights_version for response in streamed.end().values()]
    assert set(versions) == {1, 2}
    assert [version for version, _ in server.engine.sampled] == [
        str(version) for version in sorted(versions)
    ]


def test_an_abandoned_stream_leaves_the_turn(server: Served, tmp_path: Path) -> None:
    engine = ServerEngine(
        server.options[1].partition("=")[2], QUICKSTART / "policy", tmp_path, concurrency=2
    )
    _, buckets = weights_of(1.0)
    stream = engine.stream(SAMPLES, SAMPLING)
    next(stream)
    assert engine.turn.locked()
    stream.close()
    engine.update_weights(buckets, 1)
    assert len(engine.generate([prompt for prompt, _ in SAMPLES[:2]], SAMPLING)) == 2
