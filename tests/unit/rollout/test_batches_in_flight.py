"""vLLM's asynchronous scheduling: a batch is under way while the one before is read. After every
way in which a rollout ends, none is left.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dcpo.rollout import vllm_engine
from megatron_dcpo.rollout.engine import PartialRollout, SamplingConfig
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.types import Prompt

SAMPLING = SamplingConfig(n=1, temperature=1.0, top_p=1.0, top_k=0, max_tokens=8, seed=0)


class TwoBatches:
    """vLLM's ``LLMEngine`` with two batches under way: a step begins one, and reads the oldest as
    soon as there are two, or nothing is left to begin. A request ends after so many tokens.
    """

    def __init__(self, tokens: dict[str, int]) -> None:
        self.tokens = dict(tokens)
        self.running: dict[str, int] = {}
        self.queue: deque[list[str]] = deque()
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=self.queue))

    def add_request(self, name: str, *arguments: object) -> None:
        self.running[name] = 0

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def step(self) -> list[Any]:
        if self.running:
            self.queue.append(list(self.running))
            if len(self.queue) < 2:
                return []
        outputs = []
        for name in self.queue.popleft():
            if name not in self.running:
                continue  # it has ended, or was aborted, since the batch began
            self.running[name] += 1
            is_over = self.running[name] == self.tokens[name]
            completion = SimpleNamespace(token_ids=[1] * self.running[name])
            outputs.append(SimpleNamespace(request_id=name, outputs=[completion], finished=is_over))
            if is_over:
                del self.running[name]
        return outputs


class Engine(VllmEngine):
    """Its requests have no parameters, which are vLLM's own objects."""

    def __init__(self, llm_engine: TwoBatches) -> None:
        self.llm = SimpleNamespace(llm_engine=llm_engine)
        self.options = EngineOptions()
        self.tensor_model_parallel_size = 1
        self.slot_steps = vllm_engine.SlotSteps()

    def _params(self, **options: object) -> Any:
        return None


@pytest.fixture
def vllm() -> TwoBatches:
    return TwoBatches({"0": 3, "1": 5})


def steps(vllm: TwoBatches, partial: PartialRollout | None = None) -> Any:
    prompts = [Prompt(str(number), (), (1,), "1", "t") for number in range(2)]
    return Engine(vllm)._steps(
        samples=[(prompt, 0) for prompt in prompts], sampling=SAMPLING, step=0, partial=partial
    )


def test_all_requests_end(vllm: TwoBatches) -> None:
    finished = [number for outputs in steps(vllm) for number, _ in outputs]
    assert finished == [0, 1]
    assert not vllm.queue


def test_a_partial_rollout_ends(vllm: TwoBatches) -> None:
    partial = PartialRollout(should_stop=lambda: vllm.running.keys() == {"1"}, unfinished={})
    last = list(steps(vllm, partial))[-1]
    assert [number for number, _ in last] == [1]
    assert not vllm.queue


def test_a_signal_abandons_it(vllm: TwoBatches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "stop_requested", lambda: vllm.running.keys() == {"1"})
    with pytest.raises(RolloutAbandoned):
        list(steps(vllm))
    assert not vllm.queue


def test_its_reader_gives_up(vllm: TwoBatches) -> None:
    rollout = steps(vllm)
    next(rollout)
    rollout.close()
    assert not vllm.queue
    assert not vllm.running
