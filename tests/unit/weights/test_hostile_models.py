"""Model directories of others: damaged, absurd, with code of their own. One line each, and nothing
runs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout import TransformersEngine, load_tokenizer
from megatron_dcpo.rollout.engine import read_eos_token_ids
from megatron_dcpo.weights.architecture import parse_architecture
from megatron_dcpo.weights.hf_checkpoint import HFReader
from tests.helpers.paths import QUICKSTART

CONFIG = json.loads((QUICKSTART / "policy" / "config.json").read_text())


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QUICKSTART / "policy", tmp_path / "policy"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads must be a count, not 0"),
        ({"vocab_size": -5}, "vocab_size must be a count"),
        ({"vocab_size": 1 << 60}, "vocab_size must be a count"),
        ({"hidden_size": "32"}, "hidden_size must be a count"),
        ({"hidden_size": True}, "hidden_size must be a count"),
        ({"rms_norm_eps": "small"}, "not the configuration of a"),
        ({"rope_parameters": [1]}, "not the configuration of a"),
        ({"architectures": {"a": 1}}, "is not supported"),
        ({"architectures": [["Qwen3ForCausalLM"]]}, "is not supported"),
    ],
)
def test_configurations_that_cannot_be(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_architecture(CONFIG | change)


@pytest.mark.parametrize("ids", ["2", [], ["2"], [[2]], {"a": 1}, True, 2.0])
def test_end_tokens_that_cannot_be(policy: Path, ids: Any) -> None:
    (policy / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(UserError, match="eos_token_id must be a token id"):
        read_eos_token_ids(policy)


def tokenizer_with(**changes: Any) -> bytes:
    spec = json.loads((QUICKSTART / "policy" / "tokenizer.json").read_text())
    return json.dumps(spec | changes).encode()


SPEC = json.loads((QUICKSTART / "policy" / "tokenizer.json").read_text())
TOKENIZERS = {
    "cut off": b'{"version": "1.0", "model": {',
    "deep": b"[" * 10**5,
    "not UTF-8": b"\xff\xfe",
    "another kind of JSON": b"[1, 2]",
    "no model": tokenizer_with(model=None),
    "merges of nothing": tokenizer_with(
        model=SPEC["model"] | {"merges": [["absent", "gone"]]}
    ),
    "an absurd id": tokenizer_with(
        model=SPEC["model"] | {"vocab": {"a": 4_000_000_000}, "merges": []}
    ),
    "text for an id": tokenizer_with(
        model=SPEC["model"] | {"vocab": {"a": "1"}, "merges": []}
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_cannot_be(policy: Path, name: str) -> None:
    (policy / "tokenizer.json").write_bytes(TOKENIZERS[name])
    with pytest.raises(
        UserError, match=r"no usable tokenizer|has a token with the id|tokenizer\.json"
    ):
        token_bytes(load_tokenizer(policy))


def test_custom_code_of_a_directory_is_not_run(policy: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    (policy / "code.py").write_text(
        f"open({str(witness)!r}, 'w')\nclass Model: pass\nclass Tokenizer: pass\n"
    )
    own = {
        "AutoModelForCausalLM": "code.Model",
        "AutoTokenizer": ["code.Tokenizer", None],
        "AutoConfig": "code.Config",
    }
    (policy / "config.json").write_text(
        json.dumps(CONFIG | {"auto_map": own, "model_type": "own"})
    )
    (policy / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": own, "tokenizer_class": "Own"})
    )
    with pytest.raises(UserError, match="cannot load a model"):
        TransformersEngine.from_pretrained(policy)
    with contextlib.suppress(UserError):  # a class of the library may do as well
        load_tokenizer(policy)
    assert not witness.exists()


def test_weights_that_are_pickles_are_not_read(policy: Path) -> None:
    (policy / "model.safetensors").rename(policy / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load a model"):
        TransformersEngine.from_pretrained(policy)


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


F32 = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
HEADERS = {
    "negative shape": header(a=F32 | {"shape": [-2, -3]}),
    "offsets that are not whole": header(a=F32 | {"data_offsets": [0.0, 24.0]}),
    "negative start": header(a=F32 | {"data_offsets": [-8, 16]}),
    "shared bytes": header(a=F32, b=F32),
    "a hole": header(a={"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}),
    "overflow": header(a=F32 | {"shape": [1 << 62, 4]}),
    "more than there is": header(a=F32 | {"shape": [200], "data_offsets": [0, 800]}),
    "unknown type": header(a=F32 | {"dtype": "X9"}),
    "a header of a terabyte": (1 << 40).to_bytes(8, "little") + b"{}",
    "a header of the largest number": b"\xff" * 8 + b"{}",
    "deep": (10**5).to_bytes(8, "little") + b"[" * 10**5,
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_cannot_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HEADERS[name])
    with pytest.raises(UserError, match=r"model\.safetensors"):
        HFReader(tmp_path)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "x/../../model.safetensors", ""]
)
def test_an_index_cannot_lead_elsewhere(tmp_path: Path, file: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(a=F32))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": file}})
    )
    with pytest.raises(UserError, match="is missing"):
        HFReader(directory)
