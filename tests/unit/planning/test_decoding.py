"""How long an engine decodes: lengths, what runs together, and what a step of it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo.planning.decoding import (
    DecodingCosts,
    decoding_costs,
    decoding_steps,
    response_lengths,
)
from megatron_dcpo.planning.engine_memory import EngineMemory
from megatron_dcpo.planning.machine import Rates
from megatron_dcpo.planning.plan import architecture_of

COSTS = DecodingCosts(
    step=1e-3, dense=2e-3, experts=0.0, chosen=0.0, arithmetic=1e-5, sequence=1e-5, kv=1e-9
)
DENSE, MIXTURE = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B"


def engine_of(weights: int, size: int = 1) -> EngineMemory:
    return EngineMemory(
        kind="vllm",
        tensor_model_parallel_size=size,
        weights=weights,
        kv_cache=10**10,
        kv_per_token=10**5,
        sampling=0,
        concurrent=1,
        responses=1,
        resident=0,
    )


@pytest.mark.parametrize(("mean", "most"), [(300, 4000), (1000, 3968), (3000, 3968), (10, 20)])
def test_lengths_have_their_mean_although_they_are_cut_off(mean: int, most: int) -> None:
    lengths = response_lengths(mean, most, 2000)
    assert lengths.mean() == pytest.approx(mean, rel=0.005, abs=0.6)
    assert lengths.max() <= most
    assert (np.diff(lengths) >= 0).all()


def test_lengths_without_a_mean_are_the_longest() -> None:
    assert response_lengths(50, 50, 3).tolist() == [50, 50, 50]


def test_steps_by_hand() -> None:
    """Two at once: 100 and 40 begin, 70 follows the 40."""
    steps = decoding_steps(
        lengths=np.array([100.0, 40.0, 70.0]),
        prompt=10,
        prompts=1.5,
        most_sequences=2,
        cached_tokens=10**6,
    )
    assert steps.count.sum() == 110
    assert steps.running @ steps.count == 100 + 40 + 70
    alone = steps.count[steps.running == 1].sum()
    assert alone == 10  # the 70, behind the 100
    by_hand = 100 * (3e-3 + 2 * 1e-5) + 10 * (3e-3 + 1e-5) + 1.5 * 10 * 1e-5
    contexts = sum(range(10, 110)) + sum(range(10, 50)) + sum(range(10, 80))
    assert steps.seconds(COSTS) == pytest.approx(by_hand + contexts * 1e-9, rel=1e-3)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(600, 5000),
)
def test_every_token_is_decoded_once(lengths: list[int], at_once: int, cached: int) -> None:
    steps = decoding_steps(
        lengths=np.array(lengths, float),
        prompt=20,
        prompts=1.0,
        most_sequences=at_once,
        cached_tokens=cached,
    )
    assert steps.running @ steps.count == pytest.approx(sum(lengths))
    assert steps.running.max() <= at_once
    assert steps.count.sum() >= max(lengths)
    # no more than the cache holds, but for a single one
    held = steps.running * (steps.context - steps.count / 2)
    assert (held[steps.running > 1] <= cached).all()


def test_a_small_cache_takes_longer() -> None:
    lengths = np.full(32, 400.0)
    ample, small = (
        decoding_steps(
            lengths=lengths, prompt=20, prompts=1.0, most_sequences=32, cached_tokens=cached
        )
        for cached in (10**6, 4000)
    )
    assert small.seconds(COSTS) > 2 * ample.seconds(COSTS)


def test_costs_of_a_dense_model_by_hand() -> None:
    arch = architecture_of(DENSE)
    rates = Rates()
    costs = decoding_costs(arch, engine_of(weights=16 * 10**9), rates)
    assert costs.dense == pytest.approx(16e9 / (0.8 * 3350e9))
    assert costs.step == pytest.approx(36 * rates.decode_layer_us * 1e-6)
    assert costs.experts == 0
    assert costs.kv == pytest.approx(1e5 / (0.8 * 3350e9))


def test_an_engine_of_several_gpus_waits_for_all_reduces() -> None:
    arch = architecture_of(DENSE)
    rates = Rates(gpus_per_node=4)
    one, two, across = (
        decoding_costs(arch, engine_of(weights=10**9, size=size), rates).step for size in (1, 2, 8)
    )
    assert two - one == pytest.approx(2 * 36 * rates.all_reduce_us * 1e-6)
    assert across - two == pytest.approx(rates.across_nodes_ms * 1e-3)


def test_few_sequences_read_few_experts() -> None:
    """8 of 128 experts for one sequence; nearly all for a hundred."""
    arch = architecture_of(MIXTURE)
    costs = decoding_costs(arch, engine_of(weights=60 * 10**9), Rates())
    free = replace(costs, step=0.0, arithmetic=0.0, sequence=0.0, kv=0.0)
    one, hundred = free.seconds(np.array([1.0, 100.0]), np.array([0.0, 0.0]))
    assert one - costs.dense == pytest.approx(costs.experts * 8 / 128)
    assert hundred == pytest.approx(costs.dense + costs.experts, rel=0.01)
    # attention, norms, routers, embeddings: 1.5 of 30.5 billion parameters
    assert costs.dense / (costs.dense + costs.experts) == pytest.approx(0.05, abs=0.01)
