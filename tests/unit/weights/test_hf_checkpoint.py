"""A checkpoint filled slice by slice through maps of its files."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.hf_checkpoint import INDEX, HFReader, load_into, tensors_on_disk
from megatron_dcpo.weights.planner import Copy, WeightSlice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_add_up_to_the_tensors(tmp_path, dtype):
    whole = {
        "a": torch.randn(7, 5).to(dtype),
        "norm": torch.randn(3).to(dtype),
        "b": torch.randn(4, 6).to(dtype),
    }
    specs = {name: (tuple(t.shape), str(dtype).removeprefix("torch.")) for name, t in whole.items()}
    with tensors_on_disk(tmp_path, specs, max_bytes=100) as tensors:
        for name, tensor in whole.items():
            dim = tensor.dim() - 1
            for start in range(0, tensor.shape[dim], 2):
                part = tensor.narrow(dim, start, min(2, tensor.shape[dim] - start))
                WeightSlice(name, dim, start, part).write_into(tensors[name])
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert len(set(weight_map.values())) > 1
    for name, file in weight_map.items():
        assert torch.equal(load_file(tmp_path / file)[name], whole[name])


def test_a_full_disk_is_an_error_before_anything_is_mapped(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(OSError, match="No space left"),
        tensors_on_disk(tmp_path, {"a": ((4, 4), "float32")}),
    ):
        pass


@pytest.mark.parametrize(
    ("value", "kind"), [(float("nan"), "NaN"), (float("-inf"), "infinity"), (1e39, "infinity")]
)
def test_weights_that_are_not_finite_are_named_when_they_are_read(tmp_path, value, kind):
    """1e39 is a number in the file (fp64) and none in the parameter."""
    bad = torch.zeros(4, 3, dtype=torch.float64)
    bad[2, 1] = value
    for file, name, tensor in (
        ("one.safetensors", "good", torch.ones(4, 3)),
        ("two.safetensors", "bad", bad),
    ):
        save_file({name: tensor}, tmp_path / file)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"good": "one.safetensors", "bad": "two.safetensors"}})
    )
    reader, parameters = (HFReader(tmp_path), {name: torch.empty(4, 3) for name in ("good", "bad")})
    copies = {
        name: [Copy(name, first, first + 2, name, first, 0, True) for first in (0, 2)]
        for name in parameters
    }
    load_into(reader, [*copies["good"], copies["bad"][0]], parameters)
    with pytest.raises(UserError) as error:
        load_into(reader, [*copies["good"], *copies["bad"]], parameters)
    assert str(error.value).startswith(
        f"{tmp_path / 'two.safetensors'}: tensor bad has {kind} in it"
    )


def test_two_sets_of_weights_are_refused_and_both_are_named(tmp_path):
    """transformers would read the single file, vLLM the files of the index."""
    for file in ("model.safetensors", "model-00001-of-00001.safetensors"):
        save_file({"weight": torch.ones(2)}, tmp_path / file)
    weight_map = {"weight": "model-00001-of-00001.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError) as error:
        HFReader(tmp_path)
    assert "model.safetensors" in str(error.value)
    assert INDEX in str(error.value)
    (tmp_path / "model.safetensors").unlink()
    assert set(HFReader(tmp_path).files) == {"weight"}


@pytest.mark.parametrize("other", ["model_old.safetensors", "model.fp16.safetensors"])
def test_a_second_file_of_the_same_tensors_without_an_index_is_refused(tmp_path, other):
    """vLLM would read both; an adapter, or a file of other tensors, is no second set."""
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"lora_A": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert set(HFReader(tmp_path).files) == {"weight"}
    save_file({"weight": torch.zeros(2)}, tmp_path / other)
    with pytest.raises(UserError, match=rf"model\.safetensors and {other}"):
        HFReader(tmp_path)
