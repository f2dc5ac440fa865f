"""Methods: one file each, registered here. Judged samples in, token advantages and loss
contributions out.

| file | what it holds |
|---|---|
| `options.py`, `presets.py` | every option with its default; named overrides of these |
| `advantages.py` | the hybrid target, scoring rules, the calibration reward, the normalized
advantage |
| `policy_loss.py` | clipped loss, KL, entropy, importance weights, per token |
| `method.py` | what a method declares; from its scores to advantages and weights of tokens |
| `shaping.py` | a soft length penalty, an entropy coefficient that adapts |
| the others | one method each |
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.objectives import ccgspg, coupled, dcpo, grpo, posthoc, rlcr, ternary
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import ObjectiveConfig, expand_blocks, ignored_options
from megatron_dcpo.objectives.presets import PRESETS
from megatron_dcpo.runtime.plugins import is_import_path, load_object

__all__ = [
    "METHODS",
    "Method",
    "ObjectiveConfig",
    "as_method",
    "build_method",
    "find_method",
    "needs_max_response_length",
    "resolve",
]

METHODS: dict[str, Method] = {
    "grpo": grpo.METHOD,
    "dcpo": dcpo.METHOD,
    "coupled": coupled.METHOD,
    "rlcr": rlcr.METHOD,
    "ccgspg": ccgspg.METHOD,
    "posthoc": posthoc.METHOD,
    "ternary": ternary.METHOD,
}


def find_method(name: str) -> Method:
    """Return the method ``name``: a key of :data:`METHODS`, or an import path
    (``my_method.py:METHOD``).

    Raises :class:`UserError` where there is none.
    """
    if is_import_path(name):
        method = load_object(name, "objective.name")
        if not isinstance(method, Method):
            raise UserError(
                f"objective.name={name}: expected a Method of megatron_dcpo.objectives, got "
                f"{method!r:.60}"
            )
        return method
    if name not in METHODS:
        raise UserError(f"unknown objective {name!r}{did_you_mean(name, METHODS)}")
    return METHODS[name]


def build_method(config: ObjectiveConfig) -> Method:
    """Return the method that a configuration describes, every unset option filled in; raises as
    :func:`resolve`.
    """
    return replace(find_method(config.name), options=resolve(config))


def resolve(config: ObjectiveConfig) -> ObjectiveConfig:
    """Fill every unset option: explicit value, else the method's default, else the preset's, else
    the paper's.

    Raises :class:`UserError` for an unknown method, an option that the method ignores, and options
    that contradict.
    """
    method = find_method(config.name)
    if ignored := _ignored(config, method):
        readers = [
            name
            for name, other in METHODS.items()
            if ignored[0] in {*other.reads, *other.own_options}
        ]
        if readers:
            hint = f", or choose a method that reads it ({', '.join(readers)})"
        else:
            hint = ""
        raise UserError(
            f"objective.{ignored[0]} has no effect with objective.name={config.name}; remove it "
            f"(or set it to null){hint}"
        )
    defaults, preset = (
        expand_blocks(layer) for layer in (method.defaults(config), PRESETS[config.preset])
    )
    own = {
        name: defaults.pop(name, _first(default)) for name, default in method.own_options.items()
    } | config.options
    for name, value in own.items():
        _check_own_option(name, value, method.own_options[name])
    resolved = ObjectiveConfig(
        **ObjectiveConfig().model_dump() | preset | defaults | config.explicit | {"options": own}
    )
    if resolved.overlong_buffer:
        needs_length = "overlong_buffer"
    else:
        needs_length = "loss_aggregation=constant"
    if (
        needs_max_response_length(resolved)
        and resolved.max_response_length <= resolved.overlong_buffer
    ):
        raise UserError(
            f"objective.{needs_length} needs objective.max_response_length above "
            f"{resolved.overlong_buffer}, the longest "
            f"response in tokens, not {resolved.max_response_length}"
        )
    return resolved


def needs_max_response_length(config: ObjectiveConfig) -> bool:
    """Return whether an option of ``config`` is relative to the longest response that can be
    sampled.
    """
    return config.overlong_buffer > 0 or config.loss_aggregation == "constant"


def written(config: ObjectiveConfig) -> dict[str, Any]:
    """Return the section as ``config.yaml`` has it: every option that the method reads, resolved.
    It reads back alike.
    """
    method = find_method(config.name)
    resolved = resolve(config)
    read = [
        name for name in ObjectiveConfig.model_fields if name in {*method.reads, "name", "preset"}
    ]
    own = {"options": dict(resolved.options)} if resolved.options else {}
    return {name: getattr(resolved, name) for name in read} | own


def _first(default: Any) -> Any:
    return default[0] if isinstance(default, tuple) else default


def _check_own_option(name: str, value: Any, default: Any) -> None:
    """Raise :class:`UserError` unless ``value`` is of the kind of ``default``: one of a tuple's
    choices, a finite number, a text, true or false.
    """
    if isinstance(default, tuple):
        if value not in default:
            raise UserError(
                f"objective.{name}={value}: expected one of {', '.join(map(str, default))}"
            )
        return
    number = isinstance(default, int | float) and not isinstance(default, bool)
    kind = (int, float) if number else type(default)
    if not isinstance(value, kind) or (
        number and (isinstance(value, bool) or not math.isfinite(value))
    ):
        raise UserError(
            f"objective.{name}={value!r}: expected a value like its default, {default!r}"
        )


def as_method(config: ObjectiveConfig, name: str, **options: Any) -> ObjectiveConfig:
    """Return ``config`` for another method: with ``options``, and without those that this method
    ignores.
    """
    return config.changed(
        **dict.fromkeys(_ignored(config, METHODS[name])), **{"name": name} | options
    )


def _ignored(config: ObjectiveConfig, method: Method) -> list[str]:
    """Return the options that were set and that ``method`` does not read."""
    own = [name for name in config.options if name not in method.own_options]
    return ignored_options(config.explicit, {*method.reads, "options"}) + own
