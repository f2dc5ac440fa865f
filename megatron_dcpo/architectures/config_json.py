"""A decoder-only model as its Hugging Face ``config.json`` describes it, as far as the weight table
and the policy need it.

What the name of an architecture implies is in :mod:`megatron_dcpo.architectures.families`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

from megatron_dcpo.architectures.architecture import Activation, Architecture
from megatron_dcpo.architectures.experts import mixture_of_experts
from megatron_dcpo.architectures.families import ARCHITECTURES, Traits
from megatron_dcpo.architectures.keys import (
    check_keys,
    check_said_once,
    check_unquantized,
    positive,
    required,
)
from megatron_dcpo.architectures.rotations import (
    full_attention_keys,
    positions,
    rotary_embedding,
    rotary_percent,
    sliding_window,
)
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.hub import HUB_NAME
from megatron_dcpo.runtime.nearby_paths import places
from megatron_dcpo.runtime.text import read_json_object

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
    "n_routed_experts",
    "moe_intermediate_size",
    "sliding_window",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "n_group",
    "topk_group",
)
# counts that may be 0
_NUMBERS = ("first_k_dense_replace", "n_shared_experts", "num_nextn_predict_layers")
_ABSURD = 1 << 40
# what the tensors of a checkpoint are numbered by
_NUMBERED = (
    *("num_hidden_layers", "num_nextn_predict_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts"),
)
_MOST_NUMBERED = 1 << 12
# of which null is no value for transformers, and could stand for the family's or for none
_NEVER_NULL = (
    *("hidden_act", "hidden_activation", "norm_topk_prob", "tie_word_embeddings", "use_qk_norm"),
    *("n_group", "topk_group", "routed_scaling_factor", "decoder_sparse_step"),
)
_SWITCHES = ("attention_bias", "mlp_bias", "norm_topk_prob", "tie_word_embeddings", "use_qk_norm")


def read_architecture(model_dir: str | Path, weights_elsewhere: bool = False) -> Architecture:
    """Read ``model_dir/config.json``. Raises :class:`UserError` for what is missing, unknown or
    not supported.

    With ``weights_elsewhere`` the directory gives its configuration to weights that are not its
    own, so that it may say that its own are quantized.
    """
    model_dir = Path(model_dir)
    path = model_dir / "config.json"
    check_model_dir(model_dir)
    config = read_json_object(path)
    if not weights_elsewhere:
        check_unquantized(config, str(path))
    return parse_architecture(config, str(path))


def check_model_dir(model_dir: str | Path) -> None:
    """Raise :class:`UserError`, with what to pass instead, if there is no model."""
    directory = Path(model_dir)
    if (directory / "config.json").is_file():
        return
    if directory.is_file():
        raise UserError(
            f"{directory} is a file; pass the directory that holds config.json and the weights"
        )
    if (directory / "policy" / "config.json").is_file():
        raise UserError(
            f"{directory} is the directory of a run; its trained model is {directory / 'policy'}"
        )
    if directory.is_dir():
        raise UserError(
            f"{directory / 'config.json'} is missing; {directory} is not a Hugging Face checkpoint "
            "directory"
        )
    if HUB_NAME.fullmatch(str(model_dir)):
        raise UserError(
            f"model directory {model_dir} does not exist{places(model_dir)}; if it is a name on "
            f"the hub, download it to there, since {directory.parts[0]} is a directory here: "
            f"hf download {model_dir} --local-dir {model_dir}"
        )
    raise UserError(
        f"model directory {model_dir} does not exist{places(model_dir)}; pass a Hugging Face "
        "checkpoint directory"
    )


def is_known(config: dict[str, Any]) -> bool:
    """Return whether the dictionary of a ``config.json`` names an architecture of
    :data:`ARCHITECTURES`.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list):
        names = [names]
    return any(name in ARCHITECTURES for name in names if isinstance(name, str))


def parse_architecture(config: dict[str, Any], source: str = "config.json") -> Architecture:
    """Translate the dictionary of a ``config.json``; ``source`` names it in errors.

    Raises :class:`UserError` if a key may describe another model than the one that is built.
    """
    name, traits = _traits(config, source)
    check_said_once(config, source)
    check_keys(config, traits.keys, source)
    _check_types(config, traits, source)
    attention_bias = bool(config.get("attention_bias")) and not traits.always_qkv_bias
    try:
        heads = required(config, "num_attention_heads")
        hidden_size = required(config, "hidden_size")
        kv_channels = config.get("head_dim") or hidden_size // heads
        ffn_key = "moe_intermediate_size" if traits.experts else "intermediate_size"
        window = None
        if traits.windows is not None:
            window = sliding_window(config, traits.windows, source)
        base, scaling = rotary_embedding(
            full_attention_keys(config, traits, source), traits, source
        )
        experts = mixture_of_experts(config, traits, source) if traits.experts else {}
        return Architecture(
            num_layers=required(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            ffn_hidden_size=required(config, ffn_key),
            num_attention_heads=heads,
            num_query_groups=config.get("num_key_value_heads") or heads,
            kv_channels=kv_channels,
            vocab_size=required(config, "vocab_size"),
            max_position_embeddings=positions(config, scaling),
            layernorm_epsilon=positive(config, "rms_norm_eps", source),
            rotary_base=base,
            rope_scaling=scaling,
            tied_embeddings=bool(config.get("tie_word_embeddings", traits.tied_embeddings)),
            qkv_bias=traits.always_qkv_bias or attention_bias,
            output_bias=attention_bias and traits.biases_the_output,
            mlp_bias=bool(config.get("mlp_bias")),
            activation=_activation(config, traits, source),
            rotary_percent=rotary_percent(config, traits, kv_channels, source),
            query_scalar=_query_scalar(config, traits, source),
            embedding_scale=_embedding_scale(config, traits),
            sliding_window=window,
            **{**traits.implied, **_optional_norms(config), **experts},
        )
    except KeyError as error:
        raise UserError(f"{source}: {name} needs the key {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{source}: not the configuration of a {name} ({one_line(error, 200)})"
        ) from None


def _check_types(config: dict[str, Any], traits: Traits, source: str) -> None:
    """Raise :class:`UserError` for a key that is no count, number or switch and ought to be one."""
    for key in (*_SIZES, *_NUMBERS):
        value = config.get(key)
        if key == "sliding_window" and traits.windows is None:
            continue  # transformers writes 0 for a model of Qwen2-MoE that has none
        least = 0 if key in _NUMBERS else 1
        most = _MOST_NUMBERED if key in _NUMBERED else _ABSURD
        if value is not None and not (type(value) is int and least <= value <= most):
            raise UserError(
                f"{source}: {key} must be a number from {least} to {most}, not {value!r:.40}"
            )
    for key in _NEVER_NULL:
        if key in config and config[key] is None:
            raise UserError(f"{source}: {key} is null; remove it, or give its value")
    for key in _SWITCHES:
        value = config.get(key)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{source}: {key} must be true or false, not {value!r:.40}")


def _traits(config: dict[str, Any], source: str) -> tuple[str, Traits]:
    """Return the architecture's name and its traits."""
    names = config.get("architectures") or ["(none)"]
    if not isinstance(names, list):
        names = [names]
    name = str(names[0])
    if len(names) > 1:
        raise UserError(f"{source}: architectures must be one name, not {names!r:.80}")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UserError(
            f"{source}: architecture {one_line(name, 60)} is not supported; supported: {known}"
        )
    return name, ARCHITECTURES[name]


def _activation(config: dict[str, Any], traits: Traits, source: str) -> Activation:
    key = traits.activation_key
    name = config.get(key) or traits.hidden_act
    if name == "swish":
        name = "silu"
    for known in get_args(Activation):
        if name == known:
            activation: Activation = known
            return activation
    raise UserError(
        f"{source}: {key}={name!r:.60} is not supported, and it changes the model; known: "
        f"{', '.join(get_args(Activation))}"
    )


def _optional_norms(config: dict[str, Any]) -> dict[str, Any]:
    """Return the norms that a key of the configuration decides about."""
    return {"qk_layernorm": True} if config.get("use_qk_norm") else {}


def _query_scalar(config: dict[str, Any], traits: Traits, source: str) -> float | None:
    """Return the number by whose root scores are divided, None for the dimensions of a head."""
    if "query_pre_attn_scalar" not in traits.keys.translated:
        return None
    return positive(config, "query_pre_attn_scalar", source)


def _embedding_scale(config: dict[str, Any], traits: Traits) -> float | None:
    if not traits.scaled_embeddings:
        return None
    return math.sqrt(config["hidden_size"])
