"""Families whose layers are not Llama's: released configurations in both forms of the key for
rotary embeddings, and what is refused by name.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from megatron_dcpo.architectures.architecture import (
    LinearScaling,
    SlidingWindow,
    YarnScaling,
)
from megatron_dcpo.architectures.config_json import ARCHITECTURES, parse_architecture
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.plan import MODELS
from megatron_dcpo.weights.table import number_of_parameters
from tests.helpers.paths import REPOSITORY

# parameters as the model cards count them
RELEASED = {
    "zai-org/GLM-4-32B-0414": 32_566_081_536,
    "allenai/OLMo-2-1124-13B-Instruct": 13_716_198_400,
    "allenai/Olmo-3-7B-Instruct": 7_298_011_136,
    "google/gemma-3-1b-it": 999_885_952,
    # without the layers that predict further tokens
    "zai-org/GLM-4.5-Air": 106_852_245_504,
    "zai-org/GLM-4.5": 352_797_814_784,
}
GLM4, OLMO2, OLMO3, GEMMA3, AIR, GLM45 = RELEASED


def released(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return config


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_is_read_as_transformers_reads_it(name: str) -> None:
    """What transformers writes for it, in its newer form, is the same model."""
    from transformers import AutoConfig

    arch = parse_architecture(released(name))
    assert number_of_parameters(arch) == RELEASED[name]
    config = AutoConfig.from_pretrained(MODELS / name)
    rewritten = json.loads(config.to_json_string(use_diff=False))
    assert "rope_parameters" in rewritten
    assert parse_architecture(rewritten) == arch
    if arch.sliding_window is not None:
        kinds = [kind == "sliding_attention" for kind in config.layer_types]
        assert list(arch.sliding_window.layers) == kinds


def test_experts_of_released_models() -> None:
    air = parse_architecture(released(AIR))
    assert (air.dense_layers, air.dense_ffn_hidden_size) == ((0,), 10944)
    assert (air.shared_ffn_hidden_size, air.router_scale) == (1408, 1.0)
    assert not air.qk_layernorm
    large = parse_architecture(released(GLM45))
    assert (large.dense_layers, large.router_scale) == ((0, 1, 2), 2.5)
    assert large.qk_layernorm
    for arch in (air, large):
        assert (arch.router_score, arch.router_bias) == ("sigmoid", True)
        assert (arch.qkv_bias, arch.output_bias) == (True, False)
        assert arch.rotary_dimensions == 64
        assert arch.nextn_layers == 1


def test_windows_and_scaling_of_released_models() -> None:
    olmo3 = parse_architecture(released(OLMO3))
    assert olmo3.rope_scaling == YarnScaling(factor=8.0, original_max_position_embeddings=8192)
    assert olmo3.sliding_window == SlidingWindow(
        size=4096, layers=(True, True, True, False) * 8, rotary_base=500000.0
    )
    gemma3 = parse_architecture(released(GEMMA3))
    assert gemma3.tied_embeddings
    assert gemma3.embedding_scale == pytest.approx(1152**0.5)
    assert gemma3.sliding_window is not None
    assert gemma3.sliding_window.layers[:6] == (True,) * 5 + (False,)
    assert (gemma3.rotary_base, gemma3.sliding_window.rotary_base) == (1e6, 1e4)
    # of the larger models
    scaled = released(GEMMA3) | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert parse_architecture(scaled).rope_scaling == LinearScaling(8.0)


def test_layer_types_without_a_window_are_llamas() -> None:
    everywhere = {"layer_types": ["full_attention"] * 32}
    assert parse_architecture(released(OLMO3) | everywhere).sliding_window is None
    assert parse_architecture(released(OLMO3) | {"sliding_window": None}).sliding_window is None


NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def test_the_factor_inside_the_rotary_parameters_counts() -> None:
    """transformers reads that one, and writes its class's default (0.5 for GLM-4) at the top."""
    inside = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    config = {**released(GLM4), "rope_parameters": inside}
    config.pop("rope_theta", None)
    assert parse_architecture(config).rotary_percent == 0.25


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (GLM4, {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        (GLM4, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (
            GLM4,
            {"partial_rotary_factor": 0.75, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor",
        ),
        (GLM4, {"rope_theta": None}, "rope_theta"),
        (
            "Qwen/Qwen3-8B",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.87}},
            "attn_factor",
        ),
        (GLM4, {"num_hidden_layers": None}, "num_hidden_layers"),
        (GLM4, {"num_attention_heads": None}, "num_attention_heads"),
        (GLM4, {"intermediate_size": None}, "intermediate_size"),
        (GLM4, {"vocab_size": None}, "vocab_size"),
        (GLM4, {"hidden_act": None}, "hidden_act"),
        (GLM4, {"tie_word_embeddings": None}, "tie_word_embeddings"),
        (GLM4, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (GLM4, {"layer_types": ["sliding_attention"] * 61}, "layer_types"),
        (OLMO2, {"clip_qkv": 8.0}, "clip_qkv"),
        (OLMO2, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        (OLMO3, {"layer_types": ["full_attention"]}, "layer_types"),
        (OLMO3, {"layer_types": ["chunked_attention"] * 32}, "layer_types"),
        (OLMO3, {"rope_theta": 10000.0}, "rope_theta"),
        (OLMO3, {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
        (OLMO3, {"sliding_window": 0}, "sliding_window"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3, {"hidden_act": "silu"}, "hidden_act"),
        (GEMMA3, {"hidden_activation": "gelu_new"}, "hidden_activation"),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA3, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        (GEMMA3, {"rope_parameters": NESTED, "rope_theta": 5e5}, "rope_theta"),
        (
            GEMMA3,
            {
                "rope_parameters": NESTED
                | {"sliding_attention": {"rope_type": "linear", "factor": 8.0}}
            },
            "sliding_attention",
        ),
        (GEMMA3, {"text_config": {"hidden_size": 64}}, "text_config"),
    ],
)
def test_what_would_be_another_model_is_refused_by_name(
    name: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        parse_architecture(released(name) | change)


def test_a_family_with_other_layers_is_refused_by_its_name() -> None:
    """Qwen3.5's linear attention is no attention."""
    other = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    with pytest.raises(UserError, match="Qwen3_5ForCausalLM"):
        parse_architecture(other)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (GLM4, "attention_bias"),
        (GLM4, "num_key_value_heads"),
        (OLMO3, "sliding_window"),
        (GEMMA3, "head_dim"),
        (GEMMA3, "query_pre_attn_scalar"),
    ],
)
def test_a_key_for_which_transformers_has_another_default_must_be_there(
    name: str, key: str
) -> None:
    config = released(name)
    del config[key]
    with pytest.raises(UserError, match=key):
        parse_architecture(config)


def test_the_page_of_models_has_every_family() -> None:
    page = (REPOSITORY / "docs" / "models.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(ARCHITECTURES)
