"""The mixture of experts that a ``config.json`` describes."""

from __future__ import annotations

from typing import Any

from megatron_dcpo.architectures.families import Traits
from megatron_dcpo.architectures.keys import positive, required
from megatron_dcpo.errors import UserError


def mixture_of_experts(config: dict[str, Any], traits: Traits, source: str) -> dict[str, Any]:
    """Return the fields of an architecture with a mixture of experts. Raises :class:`UserError` for
    other mixtures.
    """
    chosen = required(config, "num_experts_per_tok")
    if traits.router == "sigmoid":
        number = required(config, "n_routed_experts")
        fields = _sigmoid_router(config, source)
    else:
        # transformers 5 writes num_local_experts, the checkpoints on the hub have num_experts
        number = required(config, "num_experts" if "num_experts" in config else "num_local_experts")
        fields = _softmax_router(config, traits, source)
    if chosen > number:
        raise UserError(f"{source}: num_experts_per_tok={chosen} is more than the {number} experts")
    if len(fields["dense_layers"]) == required(config, "num_hidden_layers"):
        raise UserError(
            f"{source}: no layer has experts, which is not supported for "
            f"{config['architectures']!r:.60}"
        )
    if fields["dense_layers"]:
        fields["dense_ffn_hidden_size"] = required(config, "intermediate_size")
    return {"num_experts": number, "experts_per_token": chosen, **fields}


def _softmax_router(config: dict[str, Any], traits: Traits, source: str) -> dict[str, Any]:
    """Return the fields of Qwen's mixtures: every ``decoder_sparse_step``-th layer has experts,
    unless it is one of ``mlp_only_layers``.
    """
    layers = required(config, "num_hidden_layers")
    only_mlp = config.get("mlp_only_layers") or []
    if not all(type(layer) is int and 0 <= layer < layers for layer in only_mlp):
        raise UserError(
            f"{source}: mlp_only_layers must be numbers of the {layers} layers, from 0, not "
            f"{only_mlp!r:.60}"
        )
    step = config.get("decoder_sparse_step") or 1
    dense = [layer for layer in range(layers) if layer in only_mlp or (layer + 1) % step]
    fields: dict[str, Any] = {
        "dense_layers": tuple(dense),
        "normalized_experts": bool(config.get("norm_topk_prob", False)),
    }
    if traits.shared_expert_gate:
        fields["shared_ffn_hidden_size"] = required(config, "shared_expert_intermediate_size")
        fields["shared_expert_gate"] = True
    return fields


def _sigmoid_router(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of DeepSeek-V3's mixtures: leading layers without experts, a sigmoid with
    a correction bias, and shared experts, which are one of their width together.
    """
    chosen = required(config, "num_experts_per_tok")
    number = required(config, "n_routed_experts")
    normalized = bool(required(config, "norm_topk_prob"))
    layers = required(config, "num_hidden_layers")
    dense = min(required(config, "first_k_dense_replace"), layers)
    width = required(config, "moe_intermediate_size")
    if normalized != (chosen > 1):
        raise UserError(
            f"{source}: norm_topk_prob={normalized} with num_experts_per_tok={chosen} is not "
            "supported: Megatron's sigmoid router divides the weights of several experts by their "
            "sum, and leaves that of a single one"
        )
    groups = config.get("n_group") or 1
    group_topk = config.get("topk_group") or 1
    if group_topk > groups or number % groups:
        raise UserError(
            f"{source}: n_group={groups} and topk_group={group_topk} do not divide the {number} "
            "experts"
        )
    if groups > 1 and chosen != 2 * group_topk:
        raise UserError(
            f"{source}: n_group={groups} with topk_group={group_topk} and num_experts_per_tok="
            f"{chosen} is not supported: transformers compares groups by their best 2 experts, "
            "Megatron by their best num_experts_per_tok / topk_group"
        )
    scale = 1.0
    if config.get("routed_scaling_factor") is not None:
        scale = positive(config, "routed_scaling_factor", source)
    return {
        "dense_layers": tuple(range(dense)),
        "normalized_experts": normalized,
        "shared_ffn_hidden_size": required(config, "n_shared_experts") * width,
        "router_score": "sigmoid",
        "router_bias": True,
        "router_scale": scale,
        "router_groups": groups,
        "router_group_topk": group_topk,
        "nextn_layers": config.get("num_nextn_predict_layers") or 0,
    }
