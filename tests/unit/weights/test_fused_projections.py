"""A checkpoint with queries, keys and values in one tensor, and gate and up in another: parts of it
are the weight table's tensors, and it is written as it was.
"""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import AdapterConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.weights.adapter_shape import adapter_shape
from megatron_dcpo.weights.hf_checkpoint import (
    HFReader,
    in_parts,
    joined,
    load_into,
    write_checkpoint,
)
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.planner import WeightSlice, plan
from megatron_dcpo.weights.table import fused_parts, hf_shapes, stored_shapes
from tests.helpers.checkpoints import load_model, save_model

QKV = "model.layers.1.self_attn.qkv_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"
# 8 query and 4 key heads of 4 channels
QUERIES = 32
KEYS = 16


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(tmp_path / "hf", "phi3")


def test_the_parts_are_read_where_they_are(source: Path) -> None:
    arch = read_architecture(source)
    reader = HFReader(source, arch)
    assert reader.check(arch) == ()
    whole = load_model(source)[QKV]
    assert torch.equal(reader.tensor(KEY), whole[QUERIES : QUERIES + KEYS])
    rows_and_columns = reader.slice(KEY)[3:7, 5:9]
    assert torch.equal(rows_and_columns, whole[QUERIES + 3 : QUERIES + 7, 5:9])


@pytest.mark.parametrize("max_bytes", [1 << 30, 20_000], ids=["one", "several"])
def test_the_policy_is_written_as_its_source(tmp_path: Path, source: Path, max_bytes: int) -> None:
    arch = read_architecture(source)
    reader = HFReader(source, arch)
    write_checkpoint(
        out=tmp_path / "out",
        source_dir=source,
        arch=arch,
        dtype=torch.float32,
        collect=lambda shapes: {name: reader.tensor(name) for name in shapes},
        max_bytes=max_bytes,
    )
    files = list((tmp_path / "out").glob("*.safetensors"))
    if max_bytes == 1 << 30:
        assert filecmp.cmp(source / files[0].name, files[0], shallow=False)
    else:
        assert len(files) > 1
    written = load_model(tmp_path / "out")
    expected = load_model(source)
    assert written.keys() == expected.keys() == stored_shapes(arch).keys()
    for name, tensor in expected.items():
        assert torch.equal(written[name], tensor), name


def test_parts_and_wholes_are_each_others_inverse(source: Path) -> None:
    arch = read_architecture(source)
    stored = load_model(source)
    parts = in_parts(arch, stored)
    assert {name: tuple(tensor.shape) for name, tensor in parts.items()} == dict(hf_shapes(arch))
    again = joined(arch, parts)
    assert again.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(again[name], tensor), name


def test_a_slice_goes_to_its_rows_in_the_engine(source: Path) -> None:
    engine = TransformersEngine.from_pretrained(source)
    weight = engine.model.get_parameter(QKV)
    before = weight.detach().clone()
    new = torch.full((2, weight.shape[1]), 7.0)
    engine.update_weights([[WeightSlice(KEY, 0, 3, new)]], 1)
    changed = (weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [QUERIES + 3, QUERIES + 4]
    assert (weight[changed] == 7.0).all()


def rewritten(source: Path, tensors: dict[str, torch.Tensor]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})


def test_a_fused_tensor_of_another_shape_is_named(source: Path) -> None:
    tensors = load_model(source)
    rewritten(source, tensors | {QKV: tensors[QKV][:-1].clone()})
    with pytest.raises(UserError, match=QKV):
        HFReader(source, read_architecture(source))


def test_projections_apart_are_refused(source: Path) -> None:
    """transformers has no place for them and would make numbers up."""
    arch = read_architecture(source)
    rewritten(source, in_parts(arch, load_model(source)))
    with pytest.raises(UserError, match=next(iter(fused_parts(arch)))):
        HFReader(source, arch).check(arch)


def test_a_number_that_is_none_is_named_with_its_file(tmp_path: Path) -> None:
    source = save_model(tmp_path / "hf", "phi3", max_shard_size="30KB")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    file = source / index["weight_map"][QKV]
    tensors = load_file(file)
    tensors[QKV][QUERIES + 1, 2] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    arch = read_architecture(source)
    layout = Layout(make_vocab_size_divisible_by=1)
    copies = [c for c in plan(arch, layout, Coordinates()) if c.hf == KEY]
    parameter = torch.empty(QUERIES + 2 * KEYS, 32)
    with pytest.raises(UserError, match=file.name) as raised:
        load_into(HFReader(source, arch), copies, {copies[0].megatron: parameter})
    assert KEY in str(raised.value)


def test_adapters_are_refused_by_name(source: Path) -> None:
    with pytest.raises(UserError, match=r"model\.adapter.*phi3"):
        adapter_shape(AdapterConfig(), read_architecture(source))
