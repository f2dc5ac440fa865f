"""Small random checkpoints for the conversion tests, and what their Megatron tensors must be, by
explicit formulas.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.helpers.families import draw_small_tensors, random_model

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
    "qwen3_5",
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
        before_and_after_mlp = [
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ]
    names = (
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_proj.post_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc2.post_layernorm.weight",
    )
    norms = (*before_and_after_attention, *before_and_after_mlp)
    return dict(zip(names, norms, strict=True))


def delta_net_of_layer(
    at: dict[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """The tensors of a gated delta net as Megatron has them in a checkpoint."""
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    net = "linear_attn."
    tensors = {name: at[net + name] for name in ("A_log", "dt_bias")}
    for ours, theirs in (("in_proj", "in_proj_qkv"), ("conv1d", "conv1d")):
        parts = at[f"{net}{theirs}.weight"].split([keys, keys, values])
        for name, part in zip(("query", "key", "value"), parts, strict=True):
            tensors[f"{ours}.weight.{name}"] = part
    for name, theirs in (("z", "z"), ("beta", "b"), ("alpha", "a")):
        tensors[f"in_proj.weight.{name}"] = at[f"{net}in_proj_{theirs}.weight"]
    tensors["out_norm.weight"] = at[f"{net}norm.weight"]
    tensors["out_proj.weight"] = at[f"{net}out_proj.weight"]
    return tensors


def expected_megatron(path: Path, padded: int) -> dict[str, torch.Tensor]:
    """Megatron's tensors, written down without the weight table; layers are stacked unless some
    have no experts, or no attention.
    """
    hf, config = load_model(path), json.loads((path / "config.json").read_text())
    layers, groups = config["num_hidden_layers"], config["num_key_value_heads"]
    stacks: dict[str, list[torch.Tensor]] = {}
    apart: dict[str, torch.Tensor] = {}

    def add(name: str, tensor: torch.Tensor) -> None:
        names = ("first_k_dense_replace", "mlp_only_layers", "linear_num_key_heads")
        if any(config.get(name) for name in names):
            apart[f"decoder.layers.{layer}.{name}"] = tensor
        else:
            stacks.setdefault(f"decoder.layers.{name}", []).append(tensor)

    for layer in range(layers):
        at = {
            key.removeprefix(f"model.layers.{layer}."): t
            for key, t in hf.items()
            if f".layers.{layer}." in key
        }
        if "self_attn.qkv_proj.weight" in at:
            qkv = at["self_attn.qkv_proj.weight"]
            d = config["hidden_size"] // config["num_attention_heads"]
            sizes = [config["num_attention_heads"] * d, groups * d, groups * d]
            for p, part in zip("qkv", qkv.split(sizes), strict=True):
                at[f"self_attn.{p}_proj.weight"] = part
        if "mlp.gate_up_proj.weight" in at:
            gate, up = at["mlp.gate_up_proj.weight"].chunk(2)
            at |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" in at:
                # each group: its query heads, its key head, its value head
                qkv = [
                    at[f"self_attn.{p}_proj.{kind}"].unflatten(0, (groups, -1))
                    for p in "qkv"
                ]
                if config["model_type"] == "qwen3_5_text":
                    # behind all query heads of the group, their gates
                    heads = qkv[0].unflatten(1, (-1, 2, config["head_dim"]))
                    qkv[0] = heads.transpose(1, 2).flatten(1, 3)
                add(
                    f"self_attention.linear_qkv.{kind}",
                    torch.cat(qkv, dim=1).flatten(0, 1),
                )
        if "linear_attn.A_log" in at:
            for name, tensor in delta_net_of_layer(at, config).items():
                add(f"self_attention.{name}", tensor)
        else:
            add("self_attention.linear_proj.weight", at["self_attn.o_proj.weight"])
        if "self_attn.o_proj.bias" in at:
            add("self_attention.linear_proj.bias", at["self_attn.o_proj.bias"])
        if "mlp.down_proj.bias" in at:
            gate_up = [at["mlp.gate_proj.bias"], at["mlp.up_proj.bias"]]
            add("mlp.linear_fc1.bias", torch.cat(gate_up))
            add("mlp.linear_fc2.bias", at["mlp.down_proj.bias"])
        norms = norms_of_layer(config["model_type"])
        for name, norm in norms.items():
            if "linear_attn.A_log" in at:
                name = name.replace("linear_qkv", "in_proj")
            if norm is not None and "mlp.gate.weight" not in at:
                add(name, at[f"{norm}.weight"])
        if "mlp.gate.weight" in at:
            number = len(at["mlp.gate.weight"])
            experts = [f"mlp.experts.{expert}." for expert in range(number)]
            gate, up, down = (
                torch.stack([at[f"{e}{p}_proj.weight"] for e in experts])
                for p in ("gate", "up", "down")
            )
            add("mlp.experts.experts.linear_fc1.weight", torch.cat([gate, up], dim=1))
            add("mlp.experts.experts.linear_fc2.weight", down)
            add("mlp.router.weight", at["mlp.gate.weight"])
            add(
                "self_attention.linear_qkv.layer_norm_weight",
                at["input_layernorm.weight"],
            )
            add("pre_mlp_layernorm.weight", at["post_attention_layernorm.weight"])
            if "mlp.gate.e_score_correction_bias" in at:
                add("mlp.router.expert_bias", at["mlp.gate.e_score_correction_bias"])
            if "mlp.shared_expert_gate.weight" in at:
                gate = at["mlp.shared_expert_gate.weight"]
                add("mlp.shared_experts.gate_weight", gate)
            for shared in ("mlp.shared_expert.", "mlp.shared_experts."):
                if f"{shared}up_proj.weight" in at:
                    gate_up = [at[f"{shared}{p}_proj.weight"] for p in ("gate", "up")]
                    add("mlp.shared_experts.linear_fc1.weight", torch.cat(gate_up))
                    add(
                        "mlp.shared_experts.linear_fc2.weight",
                        at[f"{shared}down_proj.weight"],
                    )
        else:
            add(
                "mlp.linear_fc1.weight",
                torch.cat([at["mlp.gate_proj.weight"], at["mlp.up_proj.weight"]]),
            )
            add("mlp.linear_fc2.weight", at["mlp.down_proj.weight"])
        for p in "qk":
            if f"self_attn.{p}_norm.weight" in at:
                add(
                    f"self_attention.{p}_layernorm.weight",
                    at[f"self_attn.{p}_norm.weight"],
                )
    result = {name: torch.stack(tensors) for name, tensors in stacks.items()} | apart
    result["decoder.final_layernorm.weight"] = hf["model.norm.weight"]

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [tensor, tensor.new_zeros(padded - len(tensor), tensor.shape[1])]
        )

    result["embedding.word_embeddings.weight"] = pad(hf["model.embed_tokens.weight"])
    if "lm_head.weight" in hf:
        result["output_layer.weight"] = pad(hf["lm_head.weight"])
    return result
