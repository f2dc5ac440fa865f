"""The rotary embeddings that a ``config.json`` describes, and the layers with a sliding window,
which have others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from megatron_dcpo.architectures.architecture import (
    LinearScaling,
    RopeScaling,
    SlidingWindow,
    YarnScaling,
    yarn_attention_factor,
)
from megatron_dcpo.architectures.families import Traits, Windows
from megatron_dcpo.architectures.keys import positive, required
from megatron_dcpo.errors import UserError


def rotary_percent(config: dict[str, Any], traits: Traits, kv_channels: int, source: str) -> float:
    """Return the part of a head's dimensions that is rotated."""
    if traits.partial_rotary_factor is None:
        return 1.0
    default = traits.partial_rotary_factor
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    inside = rope.get("partial_rotary_factor")
    outside = config.get("partial_rotary_factor")
    # transformers reads the one inside, and also writes the class's default outside
    if inside is not None and outside not in (None, inside, default):
        raise UserError(
            f"{source}: partial_rotary_factor={outside!r:.40} and {inside!r:.40} among the "
            "parameters of the rotary embedding say one thing differently; remove one of them"
        )
    factor = float(next(each for each in (inside, outside, default) if each is not None))
    rotated = int(kv_channels * factor) if 0 < factor <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise UserError(
            f"{source}: partial_rotary_factor={factor:g} must be above 0, at most 1, and leave an "
            f"even number of a head's {kv_channels} dimensions"
        )
    return factor


_KINDS = ("full_attention", "sliding_attention")


def sliding_window(config: dict[str, Any], windows: Windows, source: str) -> SlidingWindow | None:
    """Return the window of a family in which some layers have one."""
    layers = required(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        period = windows.period
        for key in ("sliding_window_pattern", "_sliding_window_pattern"):
            period = config.get(key) or period
        kinds = [_KINDS[(layer + 1) % period > 0] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_KINDS):
        raise UserError(
            f"{source}: layer_types={kinds!r:.60} must name {' or '.join(_KINDS)} for each of the "
            f"{layers} layers"
        )
    size = config["sliding_window"]  # null: no layer has one
    if "sliding_attention" not in kinds or size is None:
        return None
    return SlidingWindow(
        size=size,
        layers=tuple(kind == "sliding_attention" for kind in kinds),
        rotary_base=_sliding_base(config, windows, source),
    )


def _sliding_base(config: dict[str, Any], windows: Windows, source: str) -> float:
    """Return the base of the rotary frequencies in the layers with a window. Raises
    :class:`UserError` if they would be scaled.
    """
    nested = config.get("rope_parameters")
    if nested:
        rope = {"rope_theta": windows.rope_theta, **nested["sliding_attention"]}
        if rope.get("rope_type", "default") != "default" or rope.keys() - {
            "rope_theta",
            "rope_type",
        }:
            raise UserError(
                f"{source}: rope_parameters.sliding_attention={rope!r:.80} is not supported, and "
                "it changes the model; known there: rope_theta, and the rope_type default"
            )
        return positive(rope, "rope_theta", source)
    if windows.theta_key is not None and config.get(windows.theta_key) is not None:
        return positive(config, windows.theta_key, source)
    theta = config.get("rope_theta")
    if windows.theta_key is None and theta not in (None, windows.rope_theta):
        raise UserError(
            f"{source}: rope_theta={theta!r:.40} is of the layers without a sliding window only, "
            "or of all, depending on the release of transformers; write rope_parameters with "
            "full_attention and sliding_attention"
        )
    return windows.rope_theta


def full_attention_keys(config: dict[str, Any], traits: Traits, source: str) -> dict[str, Any]:
    """Return the configuration with the rotary embedding of the layers without a window as if it
    were that of all.
    """
    nested = config.get("rope_parameters")
    if traits.windows is None or not nested:
        return config
    if set(nested) != set(_KINDS) or not all(map(isinstance, nested.values(), [dict] * 2)):
        raise UserError(
            f"{source}: rope_parameters={nested!r:.80} must have {' and '.join(_KINDS)}"
        )
    full = nested["full_attention"]
    theta = config.get("rope_theta")
    if theta is not None and full.get("rope_theta", theta) != theta:
        raise UserError(
            f"{source}: rope_theta={theta!r:.40} and rope_parameters.full_attention say one thing "
            "differently; remove one of them"
        )
    return {**config, "rope_parameters": full}


def positions(
    config: dict[str, Any], scaling: RopeScaling | YarnScaling | LinearScaling | None
) -> int:
    """Return how many positions the model has. With YaRN this is the longer context, which model
    cards that add it to ``config.json`` do not write into ``max_position_embeddings``.
    """
    positions: int = required(config, "max_position_embeddings")
    if isinstance(scaling, YarnScaling):
        longer = int(scaling.factor * scaling.original_max_position_embeddings)
        positions = max(positions, longer)
    return positions


_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
)
_LLAMA3 = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")


def _check_rope_keys(
    rope: Mapping[str, Any], understood: Collection[str], where: str, kind: str
) -> None:
    """Raise :class:`UserError` for a key of the rotary parameters that is not ``understood``."""
    for name, value in rope.items():
        if value is None or name in understood:
            continue
        if name == "attn_factor":
            raise UserError(
                f"{where}.attn_factor={value!r:.60} is read by vLLM and not by transformers, so "
                "that the two run different models: write the factor that is meant as "
                "attention_factor, without which both compute it from factor"
            )
        raise UserError(
            f"{where}.{name}={value!r:.60} is not supported with the rope type {kind}, and it may "
            "change the model; remove the key if it does not"
        )


def rotary_embedding(
    config: dict[str, Any], traits: Traits, source: str
) -> tuple[float, RopeScaling | YarnScaling | LinearScaling | None]:
    """Return the base and the scaling of the rotary frequencies."""
    known = traits.rope_types
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(config.get(key) or {})
    # transformers prefers the theta inside, and the newer name of the type
    rope.setdefault("rope_theta", config.get("rope_theta", traits.rope_theta))
    if rope["rope_theta"] is None:
        raise UserError(
            f"{source}: rope_theta is null, and transformers refuses it; write the model's own "
            f"value, or remove the key for {traits.rope_theta:g}"
        )
    rope.setdefault("rope_type", rope.get("type", "default"))
    base = positive(rope, "rope_theta", source)
    kind = rope["rope_type"]
    if kind not in known:
        raise UserError(
            f"{source}: {key} has the rope type {kind!r:.40}, which is not supported; known for "
            f"{config['architectures']!r:.60}: {', '.join(known)}"
        )
    understood = {"rope_theta", "rope_type", "type"}
    keys_of_kind = {"llama3": set(_LLAMA3), "yarn": set(_YARN), "linear": {"factor"}}
    understood |= keys_of_kind.get(kind, set())
    is_partial = traits.partial_rotary_factor is not None
    if is_partial or rope.get("partial_rotary_factor") == 1:
        understood.add("partial_rotary_factor")
    _check_rope_keys(rope, understood, f"{source}: {key}", kind)
    if kind == "default":
        return base, None
    if kind == "linear":
        return base, LinearScaling(positive(rope, "factor", source))
    if kind == "yarn":
        return base, _yarn(rope, key, source)
    factor, high, low, original = (positive(rope, name, source) for name in _LLAMA3)
    if high <= low:
        raise UserError(
            f"{source}: {key}.high_freq_factor={high:g} must be more than low_freq_factor={low:g}"
        )
    return base, RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(original),
    )


def _yarn(rope: dict[str, Any], key: str, source: str) -> YarnScaling:
    """Return YaRN's scaling. Raises :class:`UserError` for a factor of the attention that is not
    YaRN's own: engines compute it from ``factor`` alone.
    """
    factor = positive(rope, "factor", source)
    if factor < 1:
        raise UserError(f"{source}: {key}.factor={factor:g} must be at least 1")
    numbers = {"beta_fast": 32.0, "beta_slow": 1.0}
    for name in numbers:
        if rope.get(name) is not None:
            numbers[name] = positive(rope, name, source)
    if numbers["beta_fast"] <= numbers["beta_slow"]:
        raise UserError(
            f"{source}: {key}.beta_fast={numbers['beta_fast']:g} must be more than "
            f"beta_slow={numbers['beta_slow']:g}"
        )
    truncate = rope.get("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"{source}: {key}.truncate must be true or false, not {truncate!r:.40}")
    stated = rope.get("attention_factor")
    own = yarn_attention_factor(factor)
    if stated is not None and not math.isclose(float(stated), own, rel_tol=1e-6):
        raise UserError(
            f"{source}: {key}.attention_factor={stated!r:.40} is not supported with the rope type "
            f"yarn, whose engines take {own:.6g} for factor={factor:g}; remove the key if that is "
            "the model's"
        )
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=int(
            positive(rope, "original_max_position_embeddings", source)
        ),
        beta_fast=numbers["beta_fast"],
        beta_slow=numbers["beta_slow"],
        truncate=truncate,
    )
