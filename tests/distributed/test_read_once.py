"""A checkpoint is read once for all replicas: each rank of those that hold the same tensors reads a
share and broadcasts it, and what is wrong with the files is said by all of them.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dcpo.weights.read_once import divided
from tests.helpers.launch import torchrun_all

EP2 = {"expert_model_parallel_size": 2}
CUT = {"message_bytes": 20_000}
BROKEN = "model.layers.3.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def ranks(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of both ranks by case, all from one launch."""
    broken = tmp_path_factory.mktemp("broken") / "model"
    shutil.copytree(tiny_models("qwen3"), broken)
    tensors = load_file(broken / "model.safetensors")
    tensors[BROKEN][0, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    dense = {"model": str(tiny_models("qwen3")), "parallel": {}, **CUT}
    experts = dense | {"model": str(tiny_models("qwen3_moe", True, 2))}
    jobs = {
        "dense": dense,
        "context": dense | {"parallel": {"context_parallel_size": 2}},
        "experts": experts,
        "divided experts": experts | {"parallel": EP2},
        "nan": dense | {"model": str(broken)},
        "disk": dense | {"fails_on": 1},
    }
    out = tmp_path_factory.mktemp("read_once")
    results = torchrun_all([("read_once", options) for options in jobs.values()], 2, out)
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("case", ["dense", "context", "experts", "divided experts"])
def test_no_byte_is_read_twice_and_all_arrive(ranks: dict[str, list[Any]], case: str) -> None:
    assert all(rank["same"] for rank in ranks[case])
    first, second = (dict(rank["read"]) for rank in ranks[case])
    assert first
    assert second
    assert not first.keys() & second.keys()


def test_replicas_read_the_file_together(ranks: dict[str, list[Any]], tiny_models: Any) -> None:
    """Each about a half of it; and the others' half arrives, in fewer messages than tensors."""
    stored = load_file(tiny_models("qwen3") / "model.safetensors")
    whole = sum(tensor.nbytes for tensor in stored.values())
    read = [sum(nbytes for _, nbytes in rank["read"]) for rank in ranks["dense"]]
    assert sum(read) == whole
    largest = max(tensor.nbytes for tensor in stored.values())
    assert abs(read[0] - read[1]) <= 2 * largest
    sent = ranks["dense"][0]["sent"]
    assert sent == ranks["dense"][1]["sent"]
    assert sum(sent) >= whole, "padding of the vocabulary comes too"
    assert len(sent) < len(stored)
    assert max(sent) <= max(CUT["message_bytes"], 2 * largest)


def test_a_broken_tensor_is_named_on_all_ranks(ranks: dict[str, list[Any]]) -> None:
    first, second = (rank["error"] for rank in ranks["nan"])
    assert first == second
    assert first.startswith("UserError: ")
    assert "model.safetensors" in first
    assert BROKEN in first


def test_a_rank_that_cannot_read_is_named_on_all_ranks(ranks: dict[str, list[Any]]) -> None:
    first, second = (rank["error"] for rank in ranks["disk"])
    assert first == second
    assert "rank 1" in first
    assert "Input/output error" in first


def test_the_shares_are_consecutive_and_of_like_size() -> None:
    sizes = {str(number): 10 for number in range(8)}
    assert list(divided(sizes, ranks=4).values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert divided({"embedding": 90, "a": 5, "b": 5}, ranks=2) == {
        "embedding": 0,
        "a": 1,
        "b": 1,
    }
    assert divided({"only": 0}, ranks=3) == {"only": 0}
