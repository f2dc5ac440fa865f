"""Small random checkpoints for the conversion tests, and what their Megatron tensors must be, by
explicit formulas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers.families import draw_small_tensors, random_model

Tensors = dict[str, torch.Tensor]

FAMILIES = (
    "qwen3",
    "qwen3_moe",
    "llama",
    "qwen2",
    "phi3",
    "glm",
    "glm4",
    "olmo2",
    "olmo3",
    "gemma3",
    "qwen2_moe",
    "glm4_moe",
    "dots1",
)
# heads of hidden size / number of heads
_WITHOUT_HEAD_DIM = ("llama", "mistral", "phi3", "olmo2", "olmo3")
SMALL = {
    "vocab_size": 331,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "initializer_range": 0.2,
}


def save_model(
    path: Path,
    family: str,
    tied: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **options: Any,
) -> Path:
    """A random model of the family as transformers writes it, with a tokenizer-like side file."""
    sizes: dict[str, Any] = SMALL | {"tie_word_embeddings": tied}
    if family not in _WITHOUT_HEAD_DIM:
        sizes["head_dim"] = 16
    torch.manual_seed(0)
    model = random_model(family, sizes, options).to(getattr(torch, dtype))
    draw_small_tensors(model, family)
    for key, buffer in model.named_buffers():
        if "correction_bias" in key:
            # fp32 whatever the type of the weights, as in the checkpoints on the hub
            buffer.data = buffer.data.float()
    model.save_pretrained(path, max_shard_size=max_shard_size)
    (path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 128}))
    return path


def load_model(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def norms_of_layer(model_type: str) -> dict[str, str | None]:
    """The norms of a dense layer: Megatron's names in a checkpoint, and the family's."""
    before_and_after_attention = ["input_layernorm", None]
    before_and_after_mlp = ["post_attention_layernorm", None]
    if model_type == "glm4":
        before_and_after_attention[1] = "post_self_attn_layernorm"
        before_and_after_mlp[1] = "post_mlp_layernorm"
    elif model_type.startswith("olmo"):
        before_and_after_attention = [None, "post_attention_layernorm"]
        before_and_after_mlp = [None, "post_feedforward_layernorm"]
    elif model_type.startswith("gemma"):
        before_and_after_attention[1] = "post_attention_layernorm"
        before_and_after_mlp = ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    names = (
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_proj.post_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc2.post_layernorm.weight",
    )
    norms = (*before_and_after_attention, *before_and_after_mlp)
    return dict(zip(names, norms, strict=True))


def expected_megatron(path: Path, padded: int) -> dict[str, torch.Tensor]:
    """Megatron's tensors, written down without the weight table; layers are stacked unless some
    have no experts. The vocabulary has ``padded`` rows.
    """
    hf, config = load_model(path), json.loads((path / "config.json").read_text())
    numbers = range(config["num_hidden_layers"])
    layers = [_expected_layer(hf, number, config) for number in numbers]
    result: dict[str, torch.Tensor] = {}
    differ = ("first_k_dense_replace", "mlp_only_layers")
    if any(config.get(name) for name in differ):
        for number, tensors in enumerate(layers):
            for name, tensor in tensors.items():
                result[f"decoder.layers.{number}.{name}"] = tensor
    else:
        for name in layers[0]:
            stacked = torch.stack([tensors[name] for tensors in layers])
            result[f"decoder.layers.{name}"] = stacked
    result["decoder.final_layernorm.weight"] = hf["model.norm.weight"]

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros(padded - len(tensor), tensor.shape[1])])

    result["embedding.word_embeddings.weight"] = pad(hf["model.embed_tokens.weight"])
    if "lm_head.weight" in hf:
        result["output_layer.weight"] = pad(hf["lm_head.weight"])
    return result


def _expected_layer(
    hf: Mapping[str, torch.Tensor], layer: int, config: Mapping[str, Any]
) -> Tensors:
    prefix = f"model.layers.{layer}."
    at = {k.removeprefix(prefix): t for k, t in hf.items() if k.startswith(prefix)}
    at |= _taken_apart(at, config)
    expected = _expected_attention(at, config)
    if "mlp.gate.weight" in at:
        norms = {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm",
            "pre_mlp_layernorm.weight": "post_attention_layernorm",
        }
        expected |= _expected_experts(at)
    else:
        norms = norms_of_layer(config["model_type"])
        expected |= _expected_mlp(at)
    for name, norm in norms.items():
        if norm is not None:
            expected[name] = at[f"{norm}.weight"]
    return expected


def _taken_apart(at: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The projections that a family holds several of in one tensor, each by its own name."""
    parts: Tensors = {}
    if "self_attn.qkv_proj.weight" in at:
        d = config["hidden_size"] // config["num_attention_heads"]
        keys = config["num_key_value_heads"] * d
        sizes = [config["num_attention_heads"] * d, keys, keys]
        qkv = at["self_attn.qkv_proj.weight"].split(sizes)
        for p, part in zip("qkv", qkv, strict=True):
            parts[f"self_attn.{p}_proj.weight"] = part
    if "mlp.gate_up_proj.weight" in at:
        gate, up = at["mlp.gate_up_proj.weight"].chunk(2)
        parts |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    return parts


def _expected_attention(at: Tensors, config: Mapping[str, Any]) -> Tensors:
    groups = config["num_key_value_heads"]
    expected: Tensors = {}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in at:
            # each group: its query heads, its key head, its value head
            qkv = [at[f"self_attn.{p}_proj.{kind}"].unflatten(0, (groups, -1)) for p in "qkv"]
            joined = torch.cat(qkv, dim=1).flatten(0, 1)
            expected[f"self_attention.linear_qkv.{kind}"] = joined
        if f"self_attn.o_proj.{kind}" in at:
            output = at[f"self_attn.o_proj.{kind}"]
            expected[f"self_attention.linear_proj.{kind}"] = output
    for p in "qk":
        if f"self_attn.{p}_norm.weight" in at:
            norm = at[f"self_attn.{p}_norm.weight"]
            expected[f"self_attention.{p}_layernorm.weight"] = norm
    return expected


def _expected_mlp(at: Tensors) -> Tensors:
    expected: Tensors = {}
    for kind in ("weight", "bias"):
        if f"mlp.down_proj.{kind}" in at:
            gate_up = [at[f"mlp.{p}_proj.{kind}"] for p in ("gate", "up")]
            expected[f"mlp.linear_fc1.{kind}"] = torch.cat(gate_up)
            expected[f"mlp.linear_fc2.{kind}"] = at[f"mlp.down_proj.{kind}"]
    return expected


def _expected_experts(at: Tensors) -> Tensors:
    experts = [f"mlp.experts.{expert}." for expert in range(len(at["mlp.gate.weight"]))]
    gate, up, down = (
        torch.stack([at[f"{expert}{p}_proj.weight"] for expert in experts])
        for p in ("gate", "up", "down")
    )
    expected = {
        "mlp.experts.experts.linear_fc1.weight": torch.cat([gate, up], dim=1),
        "mlp.experts.experts.linear_fc2.weight": down,
        "mlp.router.weight": at["mlp.gate.weight"],
    }
    if "mlp.gate.e_score_correction_bias" in at:
        bias = at["mlp.gate.e_score_correction_bias"]
        expected["mlp.router.expert_bias"] = bias
    if "mlp.shared_expert_gate.weight" in at:
        gate = at["mlp.shared_expert_gate.weight"]
        expected["mlp.shared_experts.gate_weight"] = gate
    for shared in ("mlp.shared_expert.", "mlp.shared_experts."):
        if f"{shared}up_proj.weight" in at:
            gate_up = [at[f"{shared}{p}_proj.weight"] for p in ("gate", "up")]
            down = at[f"{shared}down_proj.weight"]
            expected["mlp.shared_experts.linear_fc1.weight"] = torch.cat(gate_up)
            expected["mlp.shared_experts.linear_fc2.weight"] = down
    return expected
