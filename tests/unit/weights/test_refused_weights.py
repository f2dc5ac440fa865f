"""The weights of a Hugging Face directory that are refused, in one line that names the file or the
tensor: all defects that are known, for every verb that reads weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_dcpo.architectures.config_json import read_architecture
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.hf_checkpoint import INDEX, HFReader
from tests.helpers.checkpoints import load_model, save_model

Change = Callable[[Path], object]
NORM = "model.layers.1.input_layernorm.weight"
BIAS = "model.layers.0.self_attn.q_proj.bias"


def first(model_dir: Path) -> Path:
    return min(model_dir.glob("*.safetensors"))


def first_is(content: bytes) -> Change:
    """Another content of the first file."""
    return lambda model_dir: first(model_dir).write_bytes(content)


def shortened(keep: slice) -> Change:
    return lambda model_dir: first(model_dir).write_bytes(first(model_dir).read_bytes()[keep])


def with_tensors(**tensors: torch.Tensor | None) -> Change:
    """One file with other tensors, or without one (``None``); their names with ``__`` for dots."""

    def change(model_dir: Path) -> None:
        model: dict[str, torch.Tensor | None] = {**load_model(model_dir)}
        model |= {key.replace("__", "."): tensor for key, tensor in tensors.items()}
        for file in model_dir.glob("*.safetensors*"):
            file.unlink()
        kept = {name: tensor for name, tensor in model.items() if tensor is not None}
        save_file(kept, model_dir / "model.safetensors")

    return change


def norm(tensor: torch.Tensor | None) -> Change:
    return with_tensors(**{NORM.replace(".", "__"): tensor})


def config(**changes: object) -> Change:
    def change(model_dir: Path) -> None:
        path = model_dir / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def index_is(text: str) -> Change:
    return lambda model_dir: (model_dir / INDEX).write_text(text)


def in_index(name: str, file: str = "") -> Change:
    """The index says that tensor ``name`` is in ``file``, or in that of the last norm."""

    def change(model_dir: Path) -> None:
        path = model_dir / INDEX
        index = json.loads(path.read_text())
        index["weight_map"][name] = file or index["weight_map"]["model.norm.weight"]
        path.write_text(json.dumps(index))

    return change


def without_weights(model_dir: Path) -> None:
    for path in model_dir.glob("*.safetensors*"):
        path.unlink()


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
SHARD = ["model-00001"]
# what is changed, and what the message names
REFUSED: dict[str, tuple[Change, list[str]]] = {
    # the files
    "truncated data": (shortened(slice(-10)), SHARD),
    "truncated header": (shortened(slice(100)), SHARD),
    "an empty file": (first_is(b""), SHARD),
    "a header that is no mapping": (first_is(b"\x08" + bytes(7) + b"[[[[[[[["), SHARD),
    "a git-lfs pointer": (first_is(b"version https://git-lfs.github.com/spec/v1\n"), SHARD),
    "a negative shape": (first_is(header(a=F32 | {"shape": [-2, -3]})), SHARD),
    "broken offsets": (first_is(header(a=F32 | {"data_offsets": [0.0, 24.0]})), SHARD),
    "a negative start": (first_is(header(a=F32 | {"data_offsets": [-8, 16]})), SHARD),
    "shared bytes": (first_is(header(a=F32, b=F32)), SHARD),
    "a hole": (
        first_is(header(a={"dtype": "F32", "shape": [2], "data_offsets": [8, 16]})),
        SHARD,
    ),
    "an overflow": (first_is(header(a=F32 | {"shape": [1 << 62, 4]})), SHARD),
    "more than there is": (
        first_is(header(a=F32 | {"shape": [200], "data_offsets": [0, 800]})),
        SHARD,
    ),
    "an unknown type": (first_is(header(a=F32 | {"dtype": "X9"})), SHARD),
    "a header of a terabyte": (first_is((1 << 40).to_bytes(8, "little") + b"{}"), SHARD),
    "a header of the largest number": (first_is(b"\xff" * 8 + b"{}"), SHARD),
    "a deep header": (first_is((10**5).to_bytes(8, "little") + b"[" * 10**5), SHARD),
    "no weights": (without_weights, []),
    # the index
    "a missing file": (lambda d: first(d).unlink(), [*SHARD, INDEX]),
    "a tensor that no file has": (in_index("model.ghost.weight"), ["model.ghost.weight", INDEX]),
    "a file beside the directory": (in_index("model.norm.weight", "../a.safetensors"), [INDEX]),
    "a file elsewhere": (in_index("model.norm.weight", "/etc/passwd"), [INDEX]),
    "a way out and back": (in_index("model.norm.weight", "x/../../a.safetensors"), [INDEX]),
    "an index that is no JSON": (index_is("{"), [f"{INDEX}:1"]),
    "an index of another kind": (index_is("{}"), [INDEX]),
    "an index without a name": (index_is('{"weight_map": {"a": ""}}'), [INDEX]),
    # the tensors against config.json
    "a missing tensor": (norm(None), [NORM]),
    "another shape": (norm(torch.ones(31)), [NORM, "[31]", "[32]"]),
    "a tensor of integers": (norm(torch.ones(32, dtype=torch.int8)), [NORM, "int8"]),
    "a tensor of 8 bits": (norm(torch.ones(32).to(torch.float8_e4m3fn)), [NORM, "float8_e4m3fn"]),
    "a superfluous tensor": (with_tensors(model__extra__weight=torch.ones(3)), ["extra.weight"]),
    "a bias": (with_tensors(**{BIAS.replace(".", "__"): torch.ones(128)}), [BIAS]),
    "fewer layers": (config(num_hidden_layers=3), ["model.layers.3"]),
    "more layers": (config(num_hidden_layers=5), ["model.layers.4"]),
    "other heads": (config(num_attention_heads=4), ["q_proj.weight"]),
    "another vocabulary": (config(vocab_size=330), ["embed_tokens.weight", "[331, 32]"]),
    "another head than the tied embedding": (config(tie_word_embeddings=True), ["lm_head.weight"]),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files."""
    directory = tmp_path_factory.mktemp("model")
    return save_model(directory, "qwen3", max_shard_size="60KB")


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name(case: str, saved: Path, tmp_path: Path) -> None:
    change, named = REFUSED[case]
    model_dir = Path(shutil.copytree(saved, tmp_path / "policy"))
    change(model_dir)
    arch = read_architecture(model_dir)
    with pytest.raises(UserError) as refused:  # noqa: PT012 - one of the two
        reader = HFReader(model_dir, arch)
        reader.check(arch)
    said = str(refused.value)
    assert [name for name in named if name not in said] == [], said
    assert "\n" not in said


def test_what_follows_from_other_tensors_is_left_out(saved: Path, tmp_path: Path) -> None:
    """The output layer, where it equals the embedding to which it is tied, and buffers."""
    model_dir = Path(shutil.copytree(saved, tmp_path / "policy"))
    config(tie_word_embeddings=True)(model_dir)
    embedding = load_model(model_dir)["model.embed_tokens.weight"].clone()
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors = {"lm_head__weight": embedding, buffer.replace(".", "__"): torch.ones(16)}
    with_tensors(**tensors)(model_dir)
    left_out = HFReader(model_dir).check(read_architecture(model_dir))
    assert left_out == ("lm_head.weight", buffer)
