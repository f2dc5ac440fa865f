"""The vLLM engine beside the trainer on GPUs: asleep, awake with new weights, closed and started
again.
"""

import pytest

from tests.engine.test_parity import floor_of_transformers, run_models
from tests.gpu import checks, needs
from tests.helpers.launch import torchrun

pytestmark = [needs.CUDA, needs.VLLM, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_second_model_runner_samples_what_it_says(tiny_models, tmp_path, dtype):
    """On a GPU vLLM has another runner and another sampler than its CPU build, and two batches in
    flight. In bf16 it has the attention kernel of production, in fp32 another.
    """
    options = checks.sampler_options(str(tiny_models("qwen3", True)), dtype)
    (result,) = torchrun("engine_sampler", 1, tmp_path, options)
    assert result["second_runner"]
    assert result["in_flight"] == 2
    checks.sampler(result)


def check_parity(tiny_models, out, tp, engine_tp, eager=False):
    """bf16, the engine put to sleep before each of three updates: as far from the trainer as
    transformers in bf16 is from itself in fp32, by half; and nothing received that was there.
    """
    models = {
        f"{family}_{tied}": str(tiny_models(family, tied))
        for family, tied in (("qwen3", True), ("llama", False))
    }
    options = {"dtype": "bf16", "updates": 3, "sleep": True, "layers": needs.engine_layers()}
    options["eager"] = eager
    ranks = run_models(out, models, tp, 1, engine_tp, **options)
    for name in models:
        mean, most = floor_of_transformers(ranks[0][name]["exported"])
        for rank in ranks:
            result = rank[name]
            assert len(result["mean"]) == 3
            assert max(result["mean"]) <= 1.5 * mean, (name, result)
            assert max(result["differences"]) <= 2 * most, (name, result)
            assert min(result["given_back"]) >= 0.01, "GB; the cache alone is 16 MiB"
        assert all(rank[name]["greedy"] == ranks[0][name]["greedy"] for rank in ranks)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_three_sleeps_and_updates(tiny_models, tmp_path, eager):
    """Graphs are compiled and captured for every model: minutes."""
    check_parity(tiny_models, tmp_path, 1, 1, eager)


@needs.gpus(2)
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_two_trainer_ranks_feed_engines(tiny_models, tmp_path, engine_tp):
    """A trainer of TP 2 into two engines of one rank, and into one engine of two."""
    check_parity(tiny_models, tmp_path, 2, engine_tp)


@pytest.mark.parametrize(
    ("asleep", "eager"),
    [(False, True), (True, True), (False, False)],
    ids=["awake", "closed_while_kv_sleeps", "graphs"],
)
def test_a_closed_engine_leaves_nothing(tiny_models, tmp_path, asleep, eager):
    """Also where its cache sleeps, as after an update that failed: see
    tests/unit/rollout/test_sleeping_engine.py.
    """
    options = {
        "what": "restart",
        "model": str(tiny_models("qwen3", True)),
        "dtype": "bf16",
        "engine": "vllm",
    }
    options |= {"asleep": asleep, "eager": eager}
    (result,) = torchrun(
        "device", 1, tmp_path, options | {"layers": needs.engine_layers(), "leave_at_once": True}
    )
    checks.restart(result)
    before, started, *_ = result["device_gb"]
    assert started - before > 1, "the first one had taken memory"
