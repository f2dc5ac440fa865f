"""The layers of GLM-4.5 that predict further tokens: nothing here reads them, and no export loses
them.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.conversion.convert import export_checkpoint, import_checkpoint
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.hf_checkpoint import KEPT_LAYERS, HFReader, write_checkpoint
from tests.helpers.checkpoints import SMALL, load_model, save_model

PREFIX = f"model.layers.{SMALL['num_hidden_layers']}."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of GLM-4.5 in bf16 with the tensors of one more layer, in three types of numbers."""
    path = save_model(tmp_path_factory.mktemp("model"), "glm4_moe", dtype="bfloat16")
    tensors = load_file(path / "model.safetensors")
    tensors[f"{PREFIX}eh_proj.weight"] = torch.randn(4, 8).bfloat16()
    tensors[f"{PREFIX}enorm.weight"] = torch.randn(4)
    tensors[f"{PREFIX}mlp.gate.e_score_correction_bias"] = torch.randn(4)
    tensors[f"{PREFIX}mlp.experts.0.up_proj.weight"] = torch.randn(2, 4).bfloat16()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_they_come_back_to_the_byte(source: Path, tmp_path: Path) -> None:
    imported = import_checkpoint(source, tmp_path / "megatron", verify=True)
    exported = export_checkpoint(tmp_path / "megatron", tmp_path / "back", verify=True)
    for name in ("model.safetensors", "config.json"):
        assert filecmp.cmp(source / name, tmp_path / "back" / name, shallow=False)
    assert imported.tensors == exported.tensors
    assert f"{PREFIX}enorm.weight" in imported.tensors
    assert imported.ignored == ()


def test_they_come_from_the_models_own_directory(source: Path, tmp_path: Path) -> None:
    """If a training, and not an import, wrote the checkpoint."""
    import_checkpoint(source, tmp_path / "megatron")
    shutil.rmtree(tmp_path / "megatron" / "hf")
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", hf_config=source)
    assert load_model(tmp_path / "back").keys() == load_model(source).keys()


def test_a_directory_without_them_is_named(source: Path, tmp_path: Path) -> None:
    import_checkpoint(source, tmp_path / "megatron")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(source / "config.json", bare / "config.json")
    with pytest.raises(UserError, match="num_nextn_predict_layers=1"):
        export_checkpoint(tmp_path / "megatron", tmp_path / "back", hf_config=bare)
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    export_checkpoint(tmp_path / "megatron", tmp_path / "back", hf_config=bare)
    left = load_model(tmp_path / "back")
    assert not any(name.startswith(PREFIX) for name in left)


def test_a_model_that_says_it_has_none_has_no_place_for_them(source: Path, tmp_path: Path) -> None:
    path = shutil.copytree(source, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UserError, match=PREFIX):
        HFReader(path).check(read_architecture(path))


@pytest.mark.parametrize("max_bytes", [1 << 30, 20_000])
def test_a_trained_policy_has_them(source: Path, tmp_path: Path, max_bytes: int) -> None:
    """And the routers' biases in fp32."""
    arch = read_architecture(source)
    model = load_model(source)
    write_checkpoint(
        out=tmp_path / "policy",
        source_dir=source,
        arch=arch,
        dtype=torch.bfloat16,
        collect=lambda shapes: {name: model[name] for name in shapes},
        max_bytes=max_bytes,
    )
    written = load_model(tmp_path / "policy")
    assert written.keys() == model.keys()
    for name, tensor in model.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name


def test_a_damaged_file_is_named(source: Path, tmp_path: Path) -> None:
    import_checkpoint(source, tmp_path / "megatron")
    kept = tmp_path / "megatron" / "hf" / KEPT_LAYERS
    kept.write_bytes(kept.read_bytes()[:50])
    with pytest.raises(UserError, match=KEPT_LAYERS):
        export_checkpoint(tmp_path / "megatron", tmp_path / "back")
