"""Weights that arrive at a server while its responses are sampled: what is begun is continued with
them, and every part has the log-probs of the version that sampled it. The server is that of the
quickstart, in threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dcpo.rollout import server_gate
from megatron_dcpo.rollout.engine import EngineError, SamplingConfig
from megatron_dcpo.rollout.server_gate import RequestGate, Withdrawal
from megatron_dcpo.rollout.vllm_server import ServerEngine
from megatron_dcpo.types import Prompt, Response
from tests.helpers.engine_server import Served
from tests.helpers.paths import QUICKSTART
from tests.helpers.samplers import without_others
from tests.unit.rollout.test_two_servers import changed_weights

POLICY = QUICKSTART / "policy"
PROMPTS = [Prompt(str(number), (), (number, 3, 5), "5", "") for number in range(1, 7)]
SAMPLING = SamplingConfig(n=2, max_tokens=40, seed=3)
SECONDS = 0.02  # of a step of the server's engine


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    without_others(monkeypatch)


@pytest.fixture
def server() -> Iterator[Served]:
    """A server that takes its time for every token, and whose responses have no end."""
    with Served() as served:
        forward = served.engine.model.forward

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(SECONDS)
            return forward(*args, **kwargs)

        served.engine.model.forward = slow
        yield served


class Rollout:
    """A rollout in a thread of its own, as a run has it."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine = engine
        self.responses: list[Response] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        samples = [(prompt, index) for prompt in PROMPTS for index in range(SAMPLING.n)]
        try:
            for together in self.engine.stream(samples, SAMPLING, step=1):
                self.responses += together
        except EngineError as error:
            self.error = error

    def wait_until_sampled(self) -> None:
        deadline = time.monotonic() + 20
        while self.engine.gate.under_way < len(PROMPTS) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(10 * SECONDS)

    def ended(self) -> list[Response]:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.responses


def logprobs_of(model: torch.nn.Module, response: Response) -> Tensor:
    """The log-probs of a response's tokens under ``model``, in one pass."""
    (prompt,) = [one for one in PROMPTS if one.prompt_id == response.prompt_id]
    ids = torch.tensor([[*prompt.token_ids, *response.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]


def test_responses_are_continued_with_the_weights_that_arrive(
    server: Served, tmp_path: Path
) -> None:
    engine = ServerEngine([server.endpoint], POLICY, tmp_path)
    with Served() as untouched:
        before = untouched.engine.model
    rollout = Rollout(engine)
    rollout.wait_until_sampled()
    engine.update_weights(changed_weights(), version=1)
    responses = rollout.ended()
    after = server.engine.model
    assert len({response.key for response in responses}) == len(PROMPTS) * SAMPLING.n
    continued = [response for response in responses if response.segments]
    assert len(continued) >= len(PROMPTS)
    for response in responses:
        assert response.finish_reason in ("stop", "length")
        assert response.sampled_length <= SAMPLING.max_tokens
        assert sum(tokens for _, tokens in response.versions) == len(response.token_ids)
        assert [version for version, _ in response.versions] in ([0], [1], [0, 1])
        start = 0
        for version, tokens in response.versions:
            expected = logprobs_of((before, after)[version], response)
            part = slice(start, start + tokens)
            np.testing.assert_allclose(response.logprobs[part], expected[part], atol=1e-4)
            start += tokens


def test_an_idle_server_is_not_paused(server: Served, tmp_path: Path) -> None:
    engine = ServerEngine([server.endpoint], POLICY, tmp_path)
    server.http.pause = None  # it would fail
    engine.update_weights(changed_weights(), version=1)
    assert engine.weights_version == 1


def test_a_request_that_a_paused_server_holds_is_sent_again(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came after the pause, so that nothing of it has been sampled."""
    monkeypatch.setattr(server_gate, "_QUIET_SECONDS", 0.3)
    engine = ServerEngine([server.endpoint], POLICY, tmp_path)
    server.http.going_on.clear()
    rollout = Rollout(engine)
    rollout.wait_until_sampled()
    engine.update_weights(changed_weights(), version=1)
    responses = rollout.ended()
    assert {response.versions[0][0] for response in responses} == {1}
    assert len(responses) == len(PROMPTS) * SAMPLING.n


def test_weights_that_do_not_arrive_end_the_rollout(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ServerEngine([server.endpoint], POLICY, tmp_path)
    rollout = Rollout(engine)
    rollout.wait_until_sampled()

    def broken(*_: Any) -> None:
        raise EngineError("no disk")

    monkeypatch.setattr(engine, "_through_files", broken)
    with pytest.raises(EngineError, match="no disk"):
        engine.update_weights(changed_weights(), version=1)
    rollout.ended()
    assert "no disk" in str(rollout.error)
    assert server.http.going_on.is_set(), "the server samples for whoever comes next"


def test_a_gate_holds_what_comes_while_it_is_closed() -> None:
    gate, request = RequestGate(), Withdrawal()
    gate.close()
    passed = threading.Event()

    def pass_through() -> None:
        with gate.passing(request):
            passed.set()

    thread = threading.Thread(target=pass_through)
    thread.start()
    assert not passed.wait(0.2)
    gate.open()
    assert passed.wait(20)
    thread.join(20)
    assert gate.under_way == 0


def test_a_request_that_is_taken_back_waits_no_longer() -> None:
    gate, request = RequestGate(), Withdrawal()
    gate.close()
    request.set()
    with pytest.raises(EngineError), gate.passing(request):
        pass
