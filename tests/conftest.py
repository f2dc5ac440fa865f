"""Shared fixtures: tiny random checkpoints in Hugging Face format, made once per session."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.helpers.paths import DATA

if TYPE_CHECKING:
    import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
# no test depends on how busy the machine is; make test has --hypothesis-profile=ci
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50)
hypothesis.settings.load_profile("shared machine")


@pytest.fixture(autouse=True)
def _no_world_of_an_earlier_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the world of one that an earlier test made of this process: a dry run takes it for the
    number of processes that were started.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real benchmark and training files; tests that need them say so when they are absent."""
    if not DATA.is_dir():
        pytest.skip(
            f"the real data sets are not here ({DATA}); set DCPO_DATA to the directory that has "
            "them"
        )
    return DATA


def _save_tiny_model(path: Path, family: str, tied: bool, layers: int) -> Path:
    import torch
    from transformers import (
        Dots1Config,
        Dots1ForCausalLM,
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        Glm4Config,
        Glm4ForCausalLM,
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        Olmo2Config,
        Olmo2ForCausalLM,
        Olmo3Config,
        Olmo3ForCausalLM,
        Phi3Config,
        Phi3ForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(0)
    common = {
        "vocab_size": 331,  # prime: padding is needed at every TP size
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,  # peaky enough for an error to show
        "eos_token_id": 0,
    }
    if family == "llama_biases":
        biases = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
        model = LlamaForCausalLM(LlamaConfig(**common, **biases))
    elif family == "llama":
        rope = {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            # scaled down: the sequences of the tests go beyond a quarter of it
            "original_max_position_embeddings": 64,
        }
        model = LlamaForCausalLM(LlamaConfig(**common, rope_parameters=rope))
    elif family == "mistral":
        model = MistralForCausalLM(MistralConfig(**common, sliding_window=None))
    elif family == "phi3":
        # special tokens inside the small vocabulary; the numbers are those of "mistral"
        special = {"bos_token_id": 1, "pad_token_id": 0}
        model = Phi3ForCausalLM(Phi3Config(**common, **special, rms_norm_eps=1e-6))
        torch.manual_seed(0)
        apart = MistralForCausalLM(MistralConfig(**common, sliding_window=None))
        model.load_state_dict(_fused(apart.state_dict()))
    elif family == "glm4":
        model = Glm4ForCausalLM(Glm4Config(**common, pad_token_id=0))
    elif family == "olmo2":
        model = Olmo2ForCausalLM(Olmo2Config(**common, pad_token_id=0))
    elif family == "olmo3":
        # windows shorter than the sequences of the tests, which go beyond the original context
        yarn = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        rope = {
            "full_attention": yarn,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
        windows = {"sliding_window": 7, "rope_parameters": rope}
        model = Olmo3ForCausalLM(Olmo3Config(**common, **windows, pad_token_id=0))
    elif family == "gemma3":
        rope = {
            "full_attention": {
                "rope_type": "linear",
                "rope_theta": 1e6,
                "factor": 8.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
        windows = {"sliding_window": 7, "rope_parameters": rope}
        windows["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
        special = {"bos_token_id": 1, "pad_token_id": 0}
        model = Gemma3ForCausalLM(
            Gemma3TextConfig(**common, **windows, **special, query_pre_attn_scalar=48)
        )
    elif family == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **{k: v for k, v in common.items() if k != "head_dim"},
                hidden_act="silu",
            )
        )
    elif family.startswith("qwen3_moe"):
        normalized = family != "qwen3_moe_unnormalized"
        # vLLM's kernels pad the one's experts to 64, and change nothing of the shape of the other's
        width = 48 if normalized else 64
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": width,
        }
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**common, **experts, norm_topk_prob=normalized)
        )
    elif family in ("glm4_moe", "dots1"):
        experts = {
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        }
        if family == "dots1":
            grouped = {"n_group": 4, "topk_group": 2, "sliding_window": None}
            model = Dots1ForCausalLM(Dots1Config(**common, **experts, **grouped))
        else:
            attention = {"attention_bias": True, "use_qk_norm": True}
            model = Glm4MoeForCausalLM(Glm4MoeConfig(**common, **experts, **attention))
    elif family == "qwen2_moe":
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 80,
            "mlp_only_layers": [layers - 1],
        }
        # vLLM reads no head_dim here, and has one of 32
        sizes = {k: v for k, v in common.items() if k != "head_dim"}
        sizes |= {"hidden_size": 128, "initializer_range": 0.1}
        model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes, **experts))
    elif family == "qwen3_yarn":
        # the sequences of the tests go beyond the original context
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
        model = Qwen3ForCausalLM(Qwen3Config(**common, rope_parameters=rope))
    elif family == "qwen3_biases":
        biases = {"attention_bias": True, "hidden_act": "relu"}
        model = Qwen3ForCausalLM(Qwen3Config(**common, **biases))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    # Gemma's norms multiply by 1 + weight.
    center = 0.0 if family == "gemma3" else 1.0
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.uniform_(parameter, center - 0.5, center + 0.5)
    for name, buffer in model.named_buffers():
        if "correction_bias" in name:
            # as wide as the scores, so that it decides which experts are chosen
            torch.nn.init.uniform_(buffer, -0.3, 0.3)
    model.save_pretrained(path)
    return path


def _fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with queries, keys and values of each layer in one, and gate
    and up in another, as Phi-3 has them.
    """
    import torch

    tensors = dict(tensors)
    for first in [name for name in tensors if name.endswith(".q_proj.weight")]:
        names = [first.replace(".q_proj.", f".{p}_proj.") for p in "qkv"]
        tensors[first.replace(".q_proj.", ".qkv_proj.")] = torch.cat(
            [tensors.pop(name) for name in names]
        )
    for first in [name for name in tensors if name.endswith(".gate_proj.weight")]:
        names = [first, first.replace(".gate_proj.", ".up_proj.")]
        tensors[first.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat(
            [tensors.pop(name) for name in names]
        )
    return tensors


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory):
    """``tiny_models("qwen3", tied=True)`` -> directory of a random checkpoint of the family, of
    four layers.
    """
    made: dict[tuple[str, bool, int], Path] = {}

    def get(family: str, tied: bool = False, layers: int = 4) -> Path:
        key = family, tied, layers
        if key not in made:
            made[key] = _save_tiny_model(
                tmp_path_factory.mktemp(f"{family}_{tied}_{layers}"), *key
            )
        return made[key]

    return get
