"""The transport of a weight synchronization on its own, over gloo: right, counted, and named when
it is disturbed.
"""

import pytest

from tests.helpers.launch import results_of, torchrun, torchrun_all, without_launcher

TP2 = {"tensor_model_parallel_size": 2}
LEAVE = {"leave_at_once": True}  # a group with a dead member cannot be taken down in order
LAYOUTS = {"tp2": TP2, "pp2": {"pipeline_model_parallel_size": 2}}


def options(tiny_models, mode="", parallel=TP2, engine_tp=1, family="qwen3", tied=True):
    model = str(tiny_models(family, tied))
    return {
        "model": model,
        "parallel": parallel,
        "mode": mode,
        "engine_tp": engine_tp,
        "bucket_bytes": 30_000,
    }


@pytest.fixture(scope="module")
def slow(tiny_models, tmp_path_factory):
    """Results of the ranks by layout and size of the engine, all from one launch."""
    names = [(layout, engine_tp) for layout in LAYOUTS for engine_tp in (1, 2)]
    jobs = [
        ("reshard", options(tiny_models, "slow", LAYOUTS[layout], engine_tp))
        for layout, engine_tp in names
    ]
    return dict(zip(names, torchrun_all(jobs, 2, tmp_path_factory.mktemp("slow")), strict=True))


@pytest.mark.parametrize("engine_tp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_are_the_checkpoint(slow, layout, engine_tp):
    """Every slice bit for bit, counters equal to the plan, and a slow reader is waited for."""
    for rank in slow[layout, engine_tp]:
        assert rank["same"]
        assert rank["received"] == rank["planned"]
        assert rank["peak"] <= rank["planned_peak"]
        assert rank["seconds"] >= 0.05 * rank["buckets"], "no rank runs ahead of the slow one"


def test_an_engine_that_refuses_stops_all_ranks_by_name(tiny_models, tmp_path):
    first, second = torchrun("reshard", 2, tmp_path, options(tiny_models, "refuses") | LEAVE)
    assert second["error"] == "ValueError: the engine says no"
    assert "bucket 3 of" in first["error"]
    assert "rank(s) 1" in first["error"]


def test_a_reader_that_dies_is_named(tiny_models, tmp_path):
    """The survivor says who is gone and how far that one had come."""
    ranks = without_launcher("reshard", 2, tmp_path, options(tiny_models, "dead") | LEAVE)
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 17]
    error = results_of(tmp_path, 0)[0]["error"]
    assert error.startswith("SynchronizationError: weight synchronization, bucket ")
    assert "rank 1 stopped after step 2" in error


def test_not_finite_weights_are_named(tiny_models, tmp_path):
    first, second = torchrun("reshard", 2, tmp_path, options(tiny_models, "nan"))
    assert first["not_finite"] == []
    assert second["not_finite"] == ["model.embed_tokens.weight"]
