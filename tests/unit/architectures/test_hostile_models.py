"""Model directories of others: damaged, absurd, with code of their own. One line each, and nothing
runs.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.architectures.config_json import parse_architecture, read_architecture
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.planning.plan import MODELS
from megatron_dcpo.rollout.tokens import load_tokenizer, read_eos_token_ids
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.weights.hf_checkpoint import check_side_files, copy_side_files
from megatron_dcpo.weights.table import number_of_parameters
from tests.helpers.paths import QUICKSTART

CONFIG = json.loads((QUICKSTART / "policy" / "config.json").read_text())


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(QUICKSTART / "policy", tmp_path / "policy"))


LLAMA = {
    **{key: CONFIG[key] for key in CONFIG if key not in ("layer_types", "model_type")},
    "architectures": ["LlamaForCausalLM"],
}
# mistralai/Mistral-7B-Instruct-v0.3
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32768,
}
PHI4 = json.loads((MODELS / "microsoft" / "phi-4" / "config.json").read_text())
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (CONFIG, {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        (CONFIG, {"architectures": {"a": 1}}, "'a'"),
        (CONFIG, {"architectures": [["Qwen3ForCausalLM"]]}, "Qwen3ForCausalLM"),
        (CONFIG, {"num_attention_heads": 0}, "num_attention_heads"),
        (CONFIG, {"num_attention_heads": 0, "head_dim": None}, "num_attention_heads"),
        (CONFIG, {"vocab_size": -5}, "vocab_size"),
        (CONFIG, {"vocab_size": 1 << 60}, "vocab_size"),
        (CONFIG, {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        (CONFIG, {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        (CONFIG, {"hidden_size": "32"}, "hidden_size"),
        (CONFIG, {"hidden_size": True}, "hidden_size"),
        (CONFIG, {"rms_norm_eps": "small"}, "'small'"),
        (CONFIG, {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (CONFIG, {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        (CONFIG, {"rope_parameters": [1]}, "rope_parameters"),
        (CONFIG, {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        (CONFIG, {"hidden_act": "gelu_new"}, "hidden_act"),
        (CONFIG, {"use_sliding_window": True}, "use_sliding_window"),
        (CONFIG, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (CONFIG, {"mlp_bias": True}, "mlp_bias"),
        (CONFIG, {"attention_dropout": 0.1}, "attention_dropout"),
        (CONFIG, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (CONFIG, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (CONFIG, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        (CONFIG, {"num_experts": 4}, "num_experts"),
        (CONFIG, {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}, "auto_map"),
        (CONFIG, {"text_config": {"hidden_size": 64}}, "text_config"),
        (CONFIG, {"model_type": "llama"}, "model_type"),
        (CONFIG, {"architectures": ["Qwen3ForCausalLM", "LlamaForCausalLM"]}, "architectures"),
        (LLAMA, {"sliding_window": 128}, "sliding_window"),
        (MISTRAL, {"sliding_window": 4096}, "sliding_window"),
        (MISTRAL, {"attention_bias": True}, "attention_bias"),
        (MISTRAL, {"mlp_bias": True}, "mlp_bias"),
        (PHI4, {"sliding_window": 16383}, "sliding_window"),
        (PHI4, {"attention_bias": True}, "attention_bias"),
        (PHI4, {"mlp_bias": True}, "mlp_bias"),
        (PHI4, {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
        (PHI4, {"resid_pdrop": 0.1}, "resid_pdrop"),
        (PHI4, {"embd_pdrop": 0.1}, "embd_pdrop"),
        (PHI4, {"rope_scaling": LONGROPE}, "longrope"),
        # transformers takes it for longrope
        (PHI4, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA, {"architectures": ["Qwen2ForCausalLM"], "attention_bias": False}, "attention_bias"),
        (LLAMA, {"rope_parameters": LLAMA3 | {"attention_factor": 1.2}}, "attention_factor"),
        (LLAMA, {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        (LLAMA, {"rope_parameters": LLAMA3 | {"factor": 0}}, "factor"),
        (LLAMA, {"rope_parameters": {"rope_theta": 0.0}, "rope_theta": None}, "rope_theta"),
    ],
)
def test_keys_of_another_model_or_of_none_are_named(
    base: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    parse_architecture(base)
    with pytest.raises(UserError, match=named):
        parse_architecture(base | change)


@pytest.mark.parametrize(
    ("first", "second", "change"),
    [
        ("rope_parameters", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", "rope_scaling", LLAMA3),
        ("rope_parameters", "rope_theta", 500000.0),
        ("rope_parameters", "rope_parameters", {"type": "llama3", "rope_type": "yarn"}),
        ("dtype", "torch_dtype", "bfloat16"),
    ],
)
def test_keys_that_contradict_each_other_are_both_named(
    first: str, second: str, change: Any
) -> None:
    with pytest.raises(UserError) as raised:
        parse_architecture(CONFIG | {second: change})
    assert first in str(raised.value)
    assert second in str(raised.value)


def test_keys_that_say_one_thing_twice_are_read() -> None:
    twice = {
        "rope_scaling": {"type": "llama3", **LLAMA3},
        "rope_parameters": LLAMA3,
        "rope_theta": 10000.0,
    }
    scaling = parse_architecture(CONFIG | twice).rope_scaling
    assert scaling is not None
    assert scaling.factor == LLAMA3["factor"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "fp8"}),
        ("quantization_config", {"load_in_8bit": True}),
        ("compression_config", {"format": "pack-quantized"}),
        ("quantization", {"group_size": 64, "bits": 4}),
    ],
)
def test_quantized_weights_are_refused_and_the_key_is_not_exported(
    policy: Path, tmp_path: Path, key: str, value: dict[str, Any]
) -> None:
    config = {key: value, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    (policy / "config.json").write_text(json.dumps(CONFIG | config))
    with pytest.raises(UserError, match=f"{key} says that the weights are quantized"):
        read_architecture(policy)
    assert read_architecture(policy, weights_elsewhere=True).hidden_size == 64
    (tmp_path / "out").mkdir()
    copy_side_files(policy, tmp_path / "out", "float32")
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert key not in exported
    assert exported["dtype"] == exported["torch_dtype"] == "float32"


def test_links_out_of_the_directory_are_refused(policy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    check_side_files(policy)
    for name in ("notes.txt", "additional_chat_templates"):
        if name == "notes.txt":
            link = policy / name
            link.symlink_to(secret)
        else:
            (policy / name).mkdir()
            link = policy / name / "default.jinja"
            link.symlink_to(secret)
        with pytest.raises(UserError, match=link.name):
            check_side_files(policy)
        link.unlink()
    # a snapshot of the hub's cache links to the blobs beside it
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in policy.iterdir():
        if file.is_file():
            shutil.copyfile(file, blobs / file.name)
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (tmp_path / "out").mkdir()
    copy_side_files(snapshot, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


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
    "nothing": b"{}",
    "deep": b"[" * 10**5,
    "not UTF-8": b"\xff\xfe",
    "another kind of JSON": b"[1, 2]",
    "no model": tokenizer_with(model=None),
    "merges of nothing": tokenizer_with(model=SPEC["model"] | {"merges": [["absent", "gone"]]}),
    "an absurd id": tokenizer_with(
        model=SPEC["model"] | {"vocab": {"a": 4_000_000_000}, "merges": []}
    ),
    "text for an id": tokenizer_with(model=SPEC["model"] | {"vocab": {"a": "1"}, "merges": []}),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_cannot_be(policy: Path, name: str) -> None:
    (policy / "tokenizer.json").write_bytes(TOKENIZERS[name])
    with pytest.raises(UserError, match=re.escape(str(policy))):
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
    (policy / "config.json").write_text(json.dumps(CONFIG | {"auto_map": own, "model_type": "own"}))
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


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B"),
        ("run", "run/policy"),
        ("run/policy/config.json", "is a file"),
        ("elsewhere/down/there", "does not exist"),
        ("empty", "config.json is missing"),
    ],
)
def test_what_is_no_model_directory_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(QUICKSTART / "policy", tmp_path / "run" / "policy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=named):
        read_architecture(path)


def test_a_released_phi4_is_read() -> None:
    arch = parse_architecture(PHI4)
    assert (arch.rotary_base, arch.num_query_groups, arch.kv_channels) == (25e4, 10, 128)
    assert number_of_parameters(arch) == 14_659_507_200


def test_a_window_that_covers_all_positions_is_none() -> None:
    assert parse_architecture(PHI4 | {"sliding_window": 16384}) == parse_architecture(PHI4)


def test_a_released_mistral_is_read() -> None:
    arch = parse_architecture(MISTRAL)
    assert (arch.rotary_base, arch.num_query_groups, arch.kv_channels) == (1e6, 8, 128)
    assert number_of_parameters(arch) == 7_248_023_552


@pytest.mark.parametrize("key", ["sliding_window", "num_key_value_heads", "num_hidden_layers"])
def test_a_key_whose_default_is_another_model_must_be_there(key: str) -> None:
    """transformers takes a window of 4096 and 8 key/value heads for a Mistral that names none."""
    config = {name: value for name, value in MISTRAL.items() if name != key}
    with pytest.raises(UserError, match=key):
        parse_architecture(config)
