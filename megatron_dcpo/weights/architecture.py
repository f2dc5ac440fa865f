"""A decoder-only model as its Hugging Face ``config.json`` describes it, as far as the weight table
and the policy need it.

To add an architecture, write one entry in :data:`ARCHITECTURES` for its peculiarities and, if its
tensor names differ from Llama's, rows in :mod:`megatron_dcpo.weights.table`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.paths import places
from megatron_dcpo.runtime.text import read_json_object


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3.1's frequency scaling (``rope_type: llama3``), with the numbers of the checkpoint."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer in Hugging Face terms. Sizes are counts, not bytes.

    With ``num_experts`` every layer has that many experts, each an MLP of width
    ``ffn_hidden_size``; a token goes to ``experts_per_token`` of them. With ``normalized_experts``
    the weights of these sum to one.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rotary_base: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    qk_layernorm: bool
    qkv_bias: bool
    num_experts: int = 0
    experts_per_token: int = 0
    normalized_experts: bool = False


@dataclass(frozen=True)
class _Traits:
    name: str
    qk_layernorm: bool = False
    qkv_bias: bool = False
    experts: bool = False


ARCHITECTURES: dict[str, _Traits] = {
    "Qwen3ForCausalLM": _Traits("qwen3", qk_layernorm=True),
    "Qwen3MoeForCausalLM": _Traits(
        name="qwen3_moe",
        qk_layernorm=True,
        experts=True,
    ),
    "LlamaForCausalLM": _Traits("llama"),
    "Qwen2ForCausalLM": _Traits("qwen2", qkv_bias=True),
}


_SIZES = (
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_ABSURD = 1 << 40


def read_architecture(model_dir: str | Path) -> Architecture:
    """Read ``model_dir/config.json``. Raises :class:`UserError` for what is missing or unknown."""
    model_dir = Path(model_dir)
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise UserError(
            f"model directory {model_dir} does not exist{places(model_dir)}; pass a Hugging Face "
            "checkpoint directory"
        )
    if not path.is_file():
        raise UserError(
            f"{path} is missing; {model_dir} is not a Hugging Face checkpoint directory"
        )
    return parse_architecture(read_json_object(path), str(path))


def parse_architecture(
    config: dict[str, Any], source: str = "config.json"
) -> Architecture:
    """Translate the dictionary of a ``config.json``; ``source`` names it in errors."""
    names = config.get("architectures") or ["(none)"]
    name = names[0] if isinstance(names, list) else names
    traits = ARCHITECTURES.get(str(name))
    if traits is None:
        raise UserError(
            f"{source}: architecture {name} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    for key in _SIZES:
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 < value < _ABSURD):
            raise UserError(f"{source}: {key} must be a count, not {value!r:.40}")
    try:
        heads = config["num_attention_heads"]
        base, scaling = _rope(config, source)
        experts = _experts(config, source) if traits.experts else {}
        return Architecture(
            name=traits.name,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            ffn_hidden_size=config[
                "moe_intermediate_size" if traits.experts else "intermediate_size"
            ],
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            kv_channels=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            layernorm_epsilon=float(config["rms_norm_eps"]),
            rotary_base=base,
            rope_scaling=scaling,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_layernorm=traits.qk_layernorm,
            qkv_bias=traits.qkv_bias or bool(config.get("attention_bias", False)),
            **experts,
        )
    except KeyError as error:
        raise UserError(f"{source}: {name} needs the key {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{source}: not the configuration of a {name} ({one_line(error, 200)})"
        ) from None


def _experts(config: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of an architecture with a mixture of experts in every layer. Raises
    :class:`UserError` for other mixtures.
    """
    supported = {"decoder_sparse_step": 1, "mlp_only_layers": [], "n_shared_experts": 0}
    for key, expected in supported.items():
        if (config.get(key) or expected) != expected:
            raise UserError(
                f"{source}: {key}={config[key]!r:.60} is not supported; every layer must be "
                "experts alone"
            )
    # transformers 5 writes num_local_experts, the checkpoints on the hub have num_experts
    if "num_experts" in config:
        number = config["num_experts"]
    else:
        number = config["num_local_experts"]
    chosen = config["num_experts_per_tok"]
    if chosen > number:
        raise UserError(
            f"{source}: num_experts_per_tok={chosen} is more than the {number} experts"
        )
    normalized = bool(config.get("norm_topk_prob", False))
    return {
        "num_experts": number,
        "experts_per_token": chosen,
        "normalized_experts": normalized,
    }


def _rope(config: dict[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return base, None
    if kind != "llama3":
        raise UserError(
            f"{source}: rope type {kind!r} is not supported; known: default, llama3"
        )
    return base, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
