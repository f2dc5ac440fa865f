"""The vLLM engine with two batches in flight, as vLLM schedules on a GPU: its own path from the LLM
to the futures of its executor, without a model (``tests/helpers/vllm_in_flight.py``).

However a rollout ends and whatever comes after it, the next one gives the same responses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_dcpo.rollout import vllm_engine
from megatron_dcpo.rollout.engine import EngineError, PartialRollout, SamplingConfig
from megatron_dcpo.rollout.engine_options import EngineOptions
from megatron_dcpo.rollout.vllm_engine import VllmEngine
from megatron_dcpo.runtime.signals import RolloutAbandoned
from megatron_dcpo.types import Prompt, Response
from tests.helpers.vllm import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]

SAMPLING = SamplingConfig(max_tokens=64)
LENGTHS = (3, 5, 9, 9, 20, 33, 2, 7, 1, 12)  # more than the engine's slots


@pytest.fixture(scope="module")
def start(tiny_models: Any) -> Iterator[Callable[..., VllmEngine]]:
    """Starts the engine with batches in flight, ``blocks`` of KV cache and routing replay."""
    started: list[VllmEngine] = []

    def start_engine(blocks: int = 64, experts: bool = True) -> VllmEngine:
        from tests.helpers.vllm_in_flight import InFlight

        arguments = {
            "distributed_executor_backend": type("InFlight", (InFlight,), {"blocks": blocks}),
            "block_size": 16,
        }
        options = EngineOptions(
            dtype="fp32",
            max_model_len=96,
            max_num_seqs=8,
            record_experts=experts,
            arguments=arguments,
        )
        started.append(VllmEngine(tiny_models("qwen3_moe", True), options))
        return started[-1]

    with pytest.MonkeyPatch.context() as patches:
        schedule_as_on_a_gpu(patches)
        patches.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patches.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield start_engine
        for engine in started:
            engine.close()


def schedule_as_on_a_gpu(patches: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    of_the_cpu = CpuPlatform.check_and_update_config

    def check_and_update_config(platform: Any, config: Any) -> None:
        of_the_cpu(config)
        config.scheduler_config.async_scheduling = True

    patches.setattr(CpuPlatform, "check_and_update_config", classmethod(check_and_update_config))
    # routing replay is Model Runner V2's, which wants Triton
    patches.setattr("vllm.config.vllm.HAS_TRITON", True)


@pytest.fixture(scope="module")
def engine(start: Callable[..., VllmEngine]) -> VllmEngine:
    return able_to_sleep(start())


@pytest.fixture(scope="module")
def engine_without_replay(start: Callable[..., VllmEngine]) -> VllmEngine:
    return able_to_sleep(start(experts=False))


def able_to_sleep(engine: VllmEngine) -> VllmEngine:
    """The engine on a device with a memory of its own, once it has started."""
    engine._can_sleep = lambda: True  # type: ignore[method-assign]
    return engine


def core_of(engine: VllmEngine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Prompt]:
    """Prompts whose responses have so many tokens."""
    made = []
    for number, length in enumerate(lengths):
        # some share a block, so that the prefix cache has something to forget
        tokens = (length, *[5] * 17, number % 3)
        made.append(Prompt(str(number), (), tokens, "", ""))
    return made


def check(
    engine: VllmEngine, responses: list[Response], lengths: tuple[int, ...] = LENGTHS
) -> None:
    """The responses are whole, with the experts of every token that was run."""
    assert [len(response.token_ids) for response in responses] == list(lengths)
    assert {response.finish_reason for response in responses} == {"stop"}
    versions = {response.weights_version for response in responses}
    assert versions == {engine.weights_version}
    if not engine.options.record_experts:
        return
    for response, length in zip(responses, lengths, strict=True):
        assert response.experts is not None
        assert len(response.experts) == 19 + length - 1


def all_end(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    check(engine, engine.generate(prompts(), SAMPLING))


def stops_early(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial rollout ends before its longest responses."""
    steps = iter(range(100))
    partial = PartialRollout(should_stop=lambda: next(steps) > 8, unfinished={})
    samples = [(prompt, 0) for prompt in prompts()]
    batches = list(engine.stream(samples, SAMPLING, partial=partial))
    reasons = {response.finish_reason for batch in batches for response in batch}
    assert reasons == {"stop", "abort"}


def is_abandoned(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preemption of the job: a signal in the middle of a rollout."""
    steps = iter(range(100))
    with monkeypatch.context() as patches:
        patches.setattr(vllm_engine, "stop_requested", lambda: next(steps) > 8)
        with pytest.raises(RolloutAbandoned):
            engine.generate(prompts(), SAMPLING)


def is_not_read_on(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = engine.stream([(prompt, 0) for prompt in prompts()], SAMPLING)
    next(rollout)
    rollout.close()


def nothing(engine: VllmEngine) -> None:
    pass


def forgets(engine: VllmEngine) -> None:
    engine.forget_prompts()


def updates(engine: VllmEngine) -> None:
    engine.update_weights([[]], engine.weights_version + 1)


def sleeps(engine: VllmEngine) -> None:
    engine.sleep()
    updates(engine)


def validates(engine: VllmEngine) -> None:
    held_out = SamplingConfig(n=2, top_k=1, max_tokens=64)
    responses = engine.generate(prompts((4, 30)), held_out)
    assert [len(response.token_ids) for response in responses] == [4, 4, 30, 30]
    updates(engine)


USES = [nothing, forgets, updates, sleeps, validates]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("end", [all_end, is_abandoned, is_not_read_on])
def test_a_rollout_after_another(
    engine: VllmEngine,
    end: Callable[..., None],
    use: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end(engine, monkeypatch)
    assert not core_of(engine).batch_queue, "a batch that nobody reads"
    use(engine)
    check(engine, engine.generate(prompts(), SAMPLING))


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("end", [all_end, stops_early, is_abandoned])
def test_without_routing_replay(
    engine_without_replay: VllmEngine,
    end: Callable[..., None],
    use: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Partial rollouts are for this engine alone."""
    engine = engine_without_replay
    end(engine, monkeypatch)
    assert not core_of(engine).batch_queue, "a batch that nobody reads"
    use(engine)
    check(engine, engine.generate(prompts(), SAMPLING))


def test_a_cache_that_is_too_small_for_all(start: Callable[..., VllmEngine]) -> None:
    """vLLM drops a request whose next batch is in flight, and computes it anew."""
    small = start(blocks=10)
    lengths = (40,) * 8
    for _ in range(2):
        before = small.slot_steps.preemptions
        check(small, small.generate(prompts(lengths), SAMPLING), lengths)
        assert small.slot_steps.preemptions > before
        updates(small)


@pytest.mark.parametrize("use", [forgets, sleeps])
def test_without_reading_what_is_in_flight_the_next_rollout_fails(
    start: Callable[..., VllmEngine], use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The break that the tests above would find, in vLLM's own words; after it the engine can be
    started again.
    """
    engine = able_to_sleep(start())
    with monkeypatch.context() as patches:
        patches.setattr(vllm_engine, "drain", lambda engine: None)
        all_end(engine, monkeypatch)
        assert core_of(engine).batch_queue
        use(engine)
        with pytest.raises(EngineError, match="output in flight"):
            engine.generate(prompts(), SAMPLING)
    engine._can_sleep = lambda: False  # type: ignore[method-assign]
    engine.restart()
    all_end(engine, monkeypatch)
