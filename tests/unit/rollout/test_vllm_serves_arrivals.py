"""vLLM's engine takes calls between two of its steps, and a server gets them as requests. What
stands in for vLLM gives each request a token a step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall, StopTexts
from megatron_dcpo.rollout.engine import Engine, SlotSteps
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.server_gate import RequestGate
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.rollout.vllm_server import ServerEngine
from megatron_dcpo.types import Prompt, Response

END = 9


class StandIn:
    """vLLM's engine: a request has the token of its prompt's first, so many times as its second."""

    def __init__(self) -> None:
        self.requests: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.aborted: list[str] = []
        self.most = 0
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=[]))

    def add_request(self, name: str, tokens: dict[str, list[int]], params: Any) -> None:
        token, count = tokens["prompt_token_ids"]
        self.requests[name] = {"left": [token] * (count - 1) + [END], "said": [], "params": params}

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            if self.requests.pop(name, None) is not None:
                self.aborted.append(name)

    def step(self) -> list[Any]:
        self.most = max(self.most, len(self.requests))
        outputs = []
        for name, request in list(self.requests.items()):
            request["said"].append(request["left"].pop(0))
            said = list(request["said"])
            is_over = not request["left"] or len(said) == request["params"]["max_tokens"]
            if not is_over and not request["params"]["partial"]:
                continue
            reason = None
            if is_over:
                reason = "stop" if said[-1] == END else "length"
                del self.requests[name]
            completion = SimpleNamespace(
                token_ids=said,
                finish_reason=reason,
                weight_versions=(),
                logprobs=SimpleNamespace(logprobs=[-0.5] * len(said)),
            )
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion], finished=is_over))
        return outputs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = VllmEngine.__new__(VllmEngine)
    made.llm = SimpleNamespace(llm_engine=StandIn(), get_weight_version=lambda: "4")
    made.options = SimpleNamespace(at_once=4, raw_logprobs=False, record_experts=False)  # type: ignore[assignment]
    made.weights_version = 4
    made.tensor_model_parallel_size = 1
    made.slot_steps = SlotSteps()
    made._told = {}

    def params(sampling: SamplingConfig, partial: bool, **_: Any) -> dict[str, Any]:
        return {"max_tokens": sampling.max_tokens, "partial": partial}

    monkeypatch.setattr(made, "_params", params)
    return made


def call(name: str, token: int, count: int, most: int = 20, **options: Any) -> EngineCall:
    return EngineCall(Prompt(name, (), (token, count), "", "t"), 1, most, **options)


def test_calls_are_added_between_steps(engine: Any) -> None:
    arrivals = Arrivals()
    arrivals.put(call("a", 5, 6), call("b", 6, 2))
    got: list[Response] = []
    for number, together in enumerate(engine.serve(arrivals, SamplingConfig(), 7)):
        got += together
        if number == 2:
            arrivals.put(call("c", 7, 2), call("d", 8, 9, most=3))
        if len(got) == 4:
            arrivals.close()
    said = {one.prompt_id: (one.token_ids.tolist(), one.finish_reason) for one in got}
    assert said == {
        "a": ([5] * 5 + [END], "stop"),
        "b": ([6, END], "stop"),
        "c": ([7, END], "stop"),
        "d": ([8] * 3, "length"),
    }
    assert {(one.sample_index, one.weights_version, one.step) for one in got} == {(1, 4, 7)}
    assert engine.llm.llm_engine.most == 3, "they run together"


def test_a_call_that_ends_at_a_text_is_cut_and_withdrawn(engine: Any) -> None:
    told: list[int] = []

    def ends(token: int) -> bool:
        told.append(token)
        return len(told) == 3

    arrivals = Arrivals()
    arrivals.put(call("a", 5, 9, ends=ends))
    for together in engine.serve(arrivals, SamplingConfig()):
        if together:
            (one,) = together
            arrivals.close()
    assert (one.token_ids.tolist(), one.finish_reason) == ([5, 5, 5], "stop")
    assert told == [5, 5, 5]
    assert engine.llm.llm_engine.aborted == ["1"]
    assert engine._told == {}


def test_a_call_is_told_every_token_whatever_an_earlier_rollout_was_told(engine: Any) -> None:
    """Requests of two rollouts have the same names. The first one ended before its text came."""
    lengths = []
    for at in (99, 3):
        told: list[int] = []

        def ends(token: int, told: list[int] = told, at: int = at) -> bool:
            told.append(token)
            return len(told) == at

        arrivals = Arrivals()
        arrivals.put(call("a", 5, 9, ends=ends))
        for together in engine.serve(arrivals, SamplingConfig()):
            if together:
                lengths.append(len(together[0].token_ids))
                arrivals.close()
    assert lengths == [9, 3]


def test_a_call_that_is_given_up_is_withdrawn(engine: Any) -> None:
    arrivals = Arrivals()
    arrivals.put(call("a", 5, 9), call("b", 6, 4))
    got = []
    for number, together in enumerate(engine.serve(arrivals, SamplingConfig())):
        got += [one.prompt_id for one in together]
        if number == 1:
            arrivals.cancel(("a", 1))
        if got:
            arrivals.close()
    assert got == ["b"]
    assert engine.llm.llm_engine.aborted == ["1"]


def test_a_rollout_that_is_closed_withdraws_everything(engine: Any) -> None:
    arrivals = Arrivals()
    arrivals.put(call("a", 5, 9), call("b", 6, 9))
    served = engine.serve(arrivals, SamplingConfig())
    next(served)
    served.close()
    assert engine.llm.llm_engine.aborted == ["1", "2"]


def test_an_engine_that_cannot_is_refused_by_its_name() -> None:
    class Another(Engine):
        pass

    with pytest.raises(UserError, match="Another"):
        Another().serve(Arrivals(), SamplingConfig())


def test_a_server_gets_each_call_as_a_request_with_its_tokens_and_texts() -> None:
    """What the server has sampled behind a stop text is cut off; a late request is withdrawn."""
    asked: dict[int, dict[str, Any]] = {}
    release = threading.Event()

    def complete(body: dict[str, Any], withdraw: threading.Event) -> dict[str, Any]:
        token = body["prompt"][0]
        asked[token] = body
        if token == 6:
            assert withdraw.wait(10)
            release.set()
        ids = [token] * body["max_tokens"]
        logprobs = [-0.5 * place for place in range(len(ids))]
        choice = {"token_ids": ids, "finish_reason": "length"}
        return {"choices": [choice | {"logprobs": {"token_logprobs": logprobs}}]}

    server = ServerEngine.__new__(ServerEngine)
    server.gate = RequestGate()
    server.server = SimpleNamespace(
        check_version=lambda version: None, complete=complete, model="m", url=""
    )  # type: ignore[assignment]
    server.concurrency = 4
    server.weights_version = 2
    server.eos_token_ids = (1,)
    server.arch = SimpleNamespace(vocab_size=100)  # type: ignore[assignment]
    arrivals = Arrivals()
    arrivals.put(call("a", 5, 0, most=3), call("late", 6, 0, most=2))
    arrivals.put(call("b", 7, 0, most=9, ends=StopTexts(["aa", "c"], lambda token: b"a")))
    got: dict[str, Response] = {}
    for together in server.serve(arrivals, SamplingConfig(), 3):
        got.update({one.prompt_id: one for one in together})
        if len(got) == 2:
            arrivals.cancel(("late", 1))
            arrivals.close()
    assert release.wait(10)
    assert {one: body["max_tokens"] for one, body in asked.items()} == {5: 3, 6: 2, 7: 9}
    assert (asked[7]["stop"], asked[7]["skip_special_tokens"]) == (["aa", "c"], False)
    assert "stop" not in asked[5]
    assert got["a"].token_ids.tolist() == [5, 5, 5]
    assert (got["b"].token_ids.tolist(), got["b"].finish_reason) == ([7, 7], "stop")
    assert got["b"].logprobs.tolist() == [0.0, -0.5]
    assert "late" not in got
