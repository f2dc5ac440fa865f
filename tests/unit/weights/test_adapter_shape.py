"""Adapters in PEFT's format: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.config import AdapterConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.adapter_shape import ALPHA, RANK, AdapterShape, adapter_shape, read_shape
from megatron_dcpo.weights.peft_adapter import read_low_rank, write_adapter
from megatron_dcpo.weights.table import hf_shapes
from tests.helpers.paths import QUICKSTART

ARCH = read_architecture(QUICKSTART / "policy")
SHAPES = hf_shapes(ARCH)
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.1.mlp.up_proj"


def saved(
    directory: Path,
    ranks: dict[str, int],
    tensors: dict[str, torch.Tensor] | None = None,
    **config: Any,
) -> Path:
    """An adapter as PEFT saves it."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for module, rank in ranks.items():
        rows, columns = SHAPES[f"{module}.weight"]
        name = f"base_model.model.{module}"
        weights[f"{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    directory.mkdir(exist_ok=True)
    save_file({**weights, **(tensors or {})}, directory / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.05,
        "bias": "none",
        "use_dora": False,
        "modules_to_save": None,
        "target_modules": ["q_proj", "up_proj"],
        "init_lora_weights": True,
        "peft_version": "0.21.2",
        **config,
    }
    (directory / "adapter_config.json").write_text(json.dumps(written))
    return directory


def test_a_new_one_is_of_every_layer() -> None:
    shape = adapter_shape(AdapterConfig(), ARCH)
    assert len(shape.ranks) == 7 * ARCH.num_layers
    assert set(shape.ranks.values()) == {RANK}
    assert shape.scale == ALPHA / RANK
    some = adapter_shape(AdapterConfig(rank=2, targets=("q_proj",)), ARCH)
    assert list(some.ranks) == [
        f"model.layers.{layer}.self_attn.q_proj" for layer in range(ARCH.num_layers)
    ]


def test_rank_and_alpha_are_read_with_their_patterns(tmp_path: Path) -> None:
    ranks = {Q: 4, UP: 2, "model.layers.1.self_attn.q_proj": 6}
    directory = saved(
        tmp_path / "a",
        ranks,
        rank_pattern={"up_proj": 2, r"layers\.1\.self_attn\.q_proj": 6},
        alpha_pattern={"layers.0.self_attn.q_proj": 3},
    )
    shape = read_shape(directory, ARCH)
    assert shape.ranks == ranks
    assert shape.scales == {Q: 3 / 4, UP: 8 / 2, "model.layers.1.self_attn.q_proj": 8 / 6}
    assert shape.scale is None
    assert shape.dropout == 0.05
    stabilized = saved(tmp_path / "b", {Q: 4}, use_rslora=True)
    assert read_shape(stabilized, ARCH).scales == {Q: 8 / math.sqrt(4)}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Every pair with its rank and scale, in PEFT's names."""
    given = saved(tmp_path / "a", {Q: 4, UP: 2}, rank_pattern={"up_proj": 2}, use_rslora=True)
    shape = read_shape(given, ARCH)
    pairs = read_low_rank(given, ARCH)
    tensors = {}
    for name, pair in pairs.items():
        module = name.removesuffix(".weight")
        tensors[f"{module}.lora_A.weight"] = pair.A
        tensors[f"{module}.lora_B.weight"] = pair.B
    write_adapter(tmp_path / "b", tensors, shape=shape, base="model")
    again = read_shape(tmp_path / "b", ARCH)
    assert again.ranks == shape.ranks
    assert again.scales == pytest.approx(shape.scales, rel=1e-12)
    for name, pair in read_low_rank(tmp_path / "b", ARCH).items():
        assert torch.equal(pair.A, pairs[name].A)
        assert torch.equal(pair.B, pairs[name].B)


def test_a_whole_adapter_names_its_projections(tmp_path: Path) -> None:
    shape = adapter_shape(AdapterConfig(rank=1, targets=("v_proj", "o_proj")), ARCH)
    write_adapter(tmp_path / "a", {}, shape=shape, base="model")
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert sorted(written["target_modules"]) == ["o_proj", "v_proj"]
    assert "rank_pattern" not in written
    part = AdapterShape(ranks={UP: 1}, scales={UP: 1.0})
    write_adapter(tmp_path / "b", {}, shape=part, base="model")
    written = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert written["target_modules"] == [UP]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"r": 5}, Q),
        ({"r": "4"}, "r must"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"use_something_new": True}, "use_something_new"),
        ({"rank_pattern": {"q_proj": "many"}}, "q_proj"),
        ({"rank_pattern": {"(": 2}}, "pattern"),
    ],
)
def test_what_adds_something_else_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    directory = saved(tmp_path / "a", {Q: 4}, **config)
    with pytest.raises(UserError, match=named.replace(".", r"\.")):
        read_shape(directory, ARCH)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("lm_head.lora_A.weight", (4, 64)),
        (f"{Q}.lora_magnitude_vector", (4,)),
        ("model.embed_tokens.lora_embedding_A", (4, 4)),
        ("model.layers.7.self_attn.q_proj.lora_A.weight", (4, 64)),
        (f"{UP}.lora_A.weight", (4, 64)),
    ],
)
def test_tensors_without_a_place_are_refused_by_name(
    tmp_path: Path, tensor: str, shape: tuple[int, ...]
) -> None:
    extra = {f"base_model.model.{tensor}": torch.zeros(shape)}
    directory = saved(tmp_path / "a", {Q: 4}, tensors=extra)
    module = tensor.rpartition(".lora_")[0]
    with pytest.raises(UserError, match=module.replace(".", r"\.")):
        read_shape(directory, ARCH)


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        read_shape(tmp_path / "nowhere", ARCH)
    directory = saved(tmp_path / "a", {Q: 4})
    whole = directory / "adapter_model.safetensors"
    whole.write_bytes(whole.read_bytes()[:50])
    with pytest.raises(UserError, match="safetensors"):
        read_shape(directory, ARCH)
    other = saved(tmp_path / "b", {Q: 4})
    (other / "adapter_config.json").unlink()
    with pytest.raises(UserError, match="adapter_config"):
        read_shape(other, ARCH)


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    name = f"base_model.model.{Q}.lora_A.weight"
    broken = {name: torch.full((4, SHAPES[f"{Q}.weight"][1]), math.nan)}
    directory = saved(tmp_path / "a", {Q: 4}, tensors=broken)
    with pytest.raises(UserError, match=Q.replace(".", r"\.")):
        read_low_rank(directory, ARCH)
