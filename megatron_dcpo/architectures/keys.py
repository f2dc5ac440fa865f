"""The keys of a Hugging Face ``config.json``, as far as they decide which model it is.

A key is translated by :mod:`megatron_dcpo.architectures.config_json`, or it has no influence on the
forward pass, or it has one value under which the model is the one that is built here. Any other key
or value is refused by name: a model that differs from its configuration would be trained without a
sign of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dcpo.errors import UserError

# translated by megatron_dcpo.architectures.config_json
TRANSLATED = frozenset(
    {
        "architectures",
        "attention_bias",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    }
)

# Nothing in the forward pass of a decoder reads these.
WITHOUT_INFLUENCE = frozenset(
    {
        # where the file comes from and who writes it
        "_model_name_or_path",  # of a dequantized GGUF file
        "_name_or_path",
        "finetuning_task",
        "is_decoder",
        "is_llama_config",
        "name_or_path",
        "task_specific_params",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        # special tokens: megatron_dcpo.rollout.tokens reads the end tokens
        "bos_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "mask_token_id",
        "pad_token_id",
        "prefix",
        "sep_token_id",
        "tokenizer_class",
        "unk_token_id",
        # types and kernels: model.params_dtype and the engine's options decide
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "torch_dtype",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        # initialization and losses of other trainers
        "id2label",
        "initializer_range",
        "label2id",
        "num_labels",
        "output_router_logits",
        "problem_type",
        "router_aux_loss_coef",
        # what a call returns
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
        "use_return_dict",
        # defaults of generation, which old releases of transformers kept here
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_implementation",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "tf_legacy_loss",
        "top_k",
        "top_p",
        "typical_p",
        # the first layers with a sliding window, which use_sliding_window turns on
        "max_window_layers",
    }
)

# With one of these values, the key says what is built here anyway. A missing key and null do too.
FIXED: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_dropout": (0,),
    "embd_pdrop": (0,),
    "hidden_dropout": (0,),
    "is_encoder_decoder": (False,),
    "num_nextn_predict_layers": (0,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "resid_pdrop": (0,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    # only the architectures that have use_sliding_window ignore it without
    "sliding_window": (),
    "use_sliding_window": (False,),
}

# what describes quantized weights
QUANTIZED_KEYS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True)
class Keys:
    """The keys that one architecture has in addition: ``translated`` ones, and ``fixed`` ones with
    the values that are built here. ``window_is_optional`` if its ``sliding_window`` is
    only read when ``use_sliding_window`` is true, ``window_may_cover_all`` if it may be at least
    ``max_position_embeddings``, under which it cuts nothing off. ``spelled_out`` are keys without
    which transformers builds another model than this package does; null is a value.
    """

    model_type: str
    translated: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    window_is_optional: bool = False
    window_may_cover_all: bool = False
    spelled_out: Mapping[str, object] = field(default_factory=dict)


def check_keys(config: Mapping[str, Any], keys: Keys, source: str) -> None:
    """Raise :class:`UserError` if a key of ``config``, read from ``source``, may describe another
    model than the one that is built from it.
    """
    _check_whose_model(config, keys, source)
    for key, default in keys.spelled_out.items():
        if key not in config:
            raise UserError(
                f"{source}: {key} is missing, for which transformers takes {default!r}; write the "
                "model's own value (null is one)"
            )
    for key in unknown_keys(config, keys):
        value = config[key]
        if key == "layer_types":
            raise _unsupported(key, _other_kinds(value)[0], source)
        if key in FIXED or key in keys.fixed:
            raise _unsupported(key, value, source)
        raise UserError(
            f"{source}: {key}={value!r:.60} is not known for {config['architectures']!r:.60}, "
            "and it may change the model; remove the key if it does not"
        )


def unknown_keys(config: Mapping[str, Any], keys: Keys) -> tuple[str, ...]:
    """Return the keys of ``config`` that may describe another model than the one that is built for
    an architecture with these ``keys``, in their order.
    """
    fixed = {**FIXED, **keys.fixed}
    understood = (TRANSLATED | WITHOUT_INFLUENCE | keys.translated) - set(keys.fixed)
    understood |= {"model_type", *QUANTIZED_KEYS}
    if keys.window_is_optional or _window_covers_all(config, keys):
        understood |= {"sliding_window"}
    unknown = []
    for key, value in config.items():
        if value is None or key in understood:
            continue
        if key == "layer_types":
            is_known = not _other_kinds(value)
        else:
            is_known = value in fixed.get(key, ())
        if not is_known:
            unknown.append(key)
    return tuple(unknown)


def _window_covers_all(config: Mapping[str, Any], keys: Keys) -> bool:
    """Return whether the sliding window is one under which every token attends to all before it."""
    window = config.get("sliding_window")
    positions = config.get("max_position_embeddings")
    if not keys.window_may_cover_all or type(window) is not int:
        return False
    return type(positions) is int and window >= positions


def _check_whose_model(config: Mapping[str, Any], keys: Keys, source: str) -> None:
    """Raise :class:`UserError` if the file describes a model of another kind, a model inside
    another or one with code of its own.
    """
    if (config.get("model_type") or keys.model_type) != keys.model_type:
        raise UserError(
            f"{source}: model_type={config['model_type']!r:.60} contradicts architectures="
            f"{config['architectures']!r:.60}, whose model_type is {keys.model_type}"
        )
    for key in ("text_config", "vision_config"):
        if config.get(key):
            raise UserError(
                f"{source}: {key} describes a model inside this one, which is not supported; "
                "extract the language model, with its configuration at the top of the file"
            )
    if config.get("auto_map"):
        raise UserError(
            f"{source}: auto_map={config['auto_map']!r:.80} asks for the model's own code, which "
            "is never run here; remove it if the model is the architecture as transformers has it"
        )


def check_unquantized(config: Mapping[str, Any], source: str) -> None:
    """Raise :class:`UserError` if the weights that go with ``config`` are quantized."""
    for key in QUANTIZED_KEYS:
        value = config.get(key)
        if not value:
            continue
        method = "unknown"
        if isinstance(value, dict):
            method = value.get("quant_method") or value.get("quant_algo") or method
        raise UserError(
            f"{source}: {key} says that the weights are quantized ({method!s:.40}), which is not "
            "supported; take the model's bf16 or fp32 weights. A quantized model can be evaluated "
            "behind a server: dcpo evaluate --endpoint"
        )


def check_said_once(config: Mapping[str, Any], source: str) -> None:
    """Raise :class:`UserError` naming both keys if two that mean the same differ."""
    for first, second in (("dtype", "torch_dtype"), ("num_experts", "num_local_experts")):
        _check_equal((first, config.get(first)), (second, config.get(second)), source=source)
    thetas = [("rope_theta", config.get("rope_theta"))]
    scalings = []
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        if not rope:
            continue
        if not isinstance(rope, dict):
            raise UserError(f"{source}: {key} must be a mapping, not {rope!r:.60}")
        _check_equal(
            (f"{key}.rope_type", rope.get("rope_type")),
            (f"{key}.type", rope.get("type")),
            source=source,
        )
        thetas.append((f"{key}.rope_theta", rope.get("rope_theta")))
        scalings.append((key, _scaling(rope)))
    stated = [(name, value) for name, value in thetas if value is not None]
    for name, value in stated[1:]:
        _check_equal(stated[0], (name, value), source=source)
    if len(scalings) > 1:
        _check_equal(scalings[0], scalings[1], source=source)


def _other_kinds(layer_types: object) -> list[object]:
    """Return the kinds of layers without full attention."""
    kinds = layer_types if isinstance(layer_types, list) else [layer_types]
    return [kind for kind in kinds if kind != "full_attention"]


def _unsupported(key: str, value: object, source: str) -> UserError:
    return UserError(f"{source}: {key}={value!r:.60} is not supported, and it changes the model")


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a mapping says of the frequencies, without their base."""
    scaling = {
        key: value
        for key, value in rope.items()
        if key not in ("type", "rope_type", "rope_theta") and value is not None
    }
    return {"rope_type": rope.get("rope_type", rope.get("type", "default")), **scaling}


def _check_equal(first: tuple[str, object], second: tuple[str, object], source: str) -> None:
    if first[1] is None or second[1] is None or first[1] == second[1]:
        return
    raise UserError(
        f"{source}: {first[0]}={first[1]!r:.80} and {second[0]}={second[1]!r:.80} say one thing "
        "differently; remove one of them"
    )


def required(config: dict[str, Any], key: str) -> Any:  # noqa: ANN401 - checked before
    """Return a value that must be there. Raises KeyError if it is missing or null."""
    if config.get(key) is None:
        raise KeyError(key)
    return config[key]


def positive(config: dict[str, Any], key: str, source: str) -> float:
    """Return a positive, finite number. Raises KeyError if it is missing or null."""
    value = float(required(config, key))
    if not 0 < value < math.inf:
        raise UserError(f"{source}: {key} must be positive and finite, not {config[key]!r:.40}")
    return value
