"""The transport of a weight synchronisation on its own, over gloo: right, counted, and named when it is disturbed."""

import json
from pathlib import Path

import pytest

from tests.helpers.launch import torchrun, without_launcher

WORKER = Path(__file__).with_name("reshard_worker.py")
TP2 = {"tensor_model_parallel_size": 2}


def options(tiny_models, mode="", parallel=TP2, engine_tp=1, family="qwen3", tied=True):
    model = str(tiny_models(family, tied))
    return {"model": model, "parallel": parallel, "mode": mode, "engine_tp": engine_tp, "bucket_bytes": 30_000}


@pytest.mark.parametrize("engine_tp", [1, 2])
@pytest.mark.parametrize("parallel", [TP2, {"pipeline_model_parallel_size": 2}], ids=["tp2", "pp2"])
def test_slices_are_the_checkpoint(tiny_models, tmp_path, parallel, engine_tp):
    """Every slice bit for bit, counters equal to the plan, and a slow reader is waited for."""
    for rank in torchrun(WORKER, 2, tmp_path, options(tiny_models, "slow", parallel, engine_tp)):
        assert rank["same"]
        assert rank["received"] == rank["planned"]
        assert rank["peak"] <= rank["planned_peak"]
        assert rank["seconds"] >= 0.05 * rank["buckets"], "no rank runs ahead of the slow one"


def test_an_engine_that_refuses_stops_all_ranks_by_name(tiny_models, tmp_path):
    first, second = torchrun(WORKER, 2, tmp_path, options(tiny_models, "refuses"))
    assert second["error"] == "ValueError: the engine says no"
    assert "bucket 3 of" in first["error"]
    assert "rank(s) 1" in first["error"]


def test_a_reader_that_dies_is_named(tiny_models, tmp_path):
    """The survivor says who is gone and how far that one had come."""
    assert without_launcher(WORKER, 2, tmp_path, options(tiny_models, "dead")) == [0, 17]
    error = json.loads((tmp_path / "rank0.json").read_text())["error"]
    assert error.startswith("SynchronisationError: weight synchronisation, bucket ")
    assert "rank 1 stopped after step 2" in error


def test_not_finite_weights_are_named(tiny_models, tmp_path):
    first, second = torchrun(WORKER, 2, tmp_path, options(tiny_models, "nan"))
    assert first["not_finite"] == []
    assert second["not_finite"] == ["model.embed_tokens.weight"]
