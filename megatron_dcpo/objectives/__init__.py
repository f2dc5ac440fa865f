"""Methods: one file each, registered here. They turn judged samples into token advantages and loss
contributions.

| file | contents |
|---|---|
| `options.py`, `presets.py` | every option with its default; named sets of other defaults |
| `advantages.py` | hybrid target, scoring rules, calibration reward, normalized advantage |
| `policy_loss.py` | clipped loss, a teacher's part, KL, entropy, importance weights, per token |
| `method.py` | what a method declares; advantages and weights of tokens from its scores |
| `shaping.py` | a soft length penalty, an adaptive entropy coefficient |
| the others | one method each |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_dcpo.errors import UserError, did_you_mean
from megatron_dcpo.objectives.method import Method
from megatron_dcpo.objectives.options import (
    OWN_OPTIONS,
    ObjectiveConfig,
    expand_blocks,
    ignored_options,
)
from megatron_dcpo.objectives.presets import PRESETS
from megatron_dcpo.runtime.plugins import is_import_path, load_object, load_part
from megatron_dcpo.types import BLOCKS

__all__ = [
    "METHODS",
    "Method",
    "ObjectiveConfig",
    "as_method",
    "build_method",
    "find_method",
    "needs_max_response_length",
    "registered_methods",
    "resolve",
]

# of a method's file, the object METHOD; it is imported when a configuration names the method
METHODS: dict[str, str] = {
    "grpo": "megatron_dcpo.objectives.grpo:METHOD",
    "dcpo": "megatron_dcpo.objectives.dcpo:METHOD",
    "coupled": "megatron_dcpo.objectives.coupled:METHOD",
    "rlcr": "megatron_dcpo.objectives.rlcr:METHOD",
    "ccgspg": "megatron_dcpo.objectives.ccgspg:METHOD",
    "posthoc": "megatron_dcpo.objectives.posthoc:METHOD",
    "ternary": "megatron_dcpo.objectives.ternary:METHOD",
}


def registered_methods() -> dict[str, Method]:
    """Return all registered methods by their names."""
    return {name: load_part(path) for name, path in METHODS.items()}


def find_method(name: str) -> Method:
    """Return the method ``name``: a key of :data:`METHODS`, or an import path
    (``my_method.py:METHOD``).

    Raises :class:`UserError` if there is none.
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
    registered: Method = load_part(METHODS[name])
    return registered


def build_method(config: ObjectiveConfig) -> Method:
    """Return the method that a configuration describes, with every unset option filled in. Raises
    as :func:`resolve` does, and :class:`UserError` if a user's method cannot score a group.
    """
    method = replace(find_method(config.name), options=resolve(config))
    if is_import_path(config.name):
        method.check_scores()
    return method


def resolve(config: ObjectiveConfig) -> ObjectiveConfig:
    """Fill every unset option with the method's default, else the preset's, else the paper's. A
    preset sets what the method reads and nothing else.

    Raises :class:`UserError` for an unknown method, for an option that the method ignores, and for
    options that contradict each other.
    """
    method = find_method(config.name)
    _refuse_ignored(config, method)
    defaults = expand_blocks(method.defaults(config))
    preset = expand_blocks(PRESETS[config.preset])
    preset = {name: value for name, value in preset.items() if name in method.reads}
    own_options: dict[str, Any] = {}
    for name, default in method.own_options.items():
        own_options[name] = defaults.pop(name, _first(default))
    own_options.update(config.options)
    for name, value in own_options.items():
        _check_own_option(name, value, method.own_options[name])
    values = ObjectiveConfig().model_dump()
    for layer in (preset, defaults):
        values.update(layer)
    changed = [name for name, value in config.explicit.items() if value != values[name]]
    values.update(config.explicit)
    values["options"] = own_options
    resolved = ObjectiveConfig(**values)
    _check_length(resolved)
    _refuse_without_effect(resolved, method, changed)
    return resolved


def _refuse_ignored(config: ObjectiveConfig, method: Method) -> None:
    ignored = _ignored(config, method)
    if not ignored:
        return
    if ignored[0] in config.options and ignored[0] not in OWN_OPTIONS:
        valid = "it has no options"
        if ignored[0] in ObjectiveConfig.model_fields:
            valid = f"write objective.{ignored[0]}"
        elif method.own_options:
            valid = did_you_mean(ignored[0], method.own_options).removeprefix("; ")
        raise UserError(
            f"objective.options.{ignored[0]}: no option of objective.name={config.name}; {valid}"
        )
    readers = []
    for name, other in registered_methods().items():
        if ignored[0] in other.reads or ignored[0] in other.own_options:
            readers.append(name)
    hint = ""
    if readers:
        hint = f", or choose a method that reads it ({', '.join(readers)})"
    raise UserError(
        f"objective.{ignored[0]} has no effect with objective.name={config.name}; remove it (or "
        f"set it to null){hint}"
    )


# options that are read only if another one says so: when, and what that is
_READ_WITH: Mapping[str, tuple[Callable[[ObjectiveConfig], bool], str]] = {
    "kl_estimator": (lambda options: any(options.blocks("kl_coef")), "objective.kl_coef"),
    "teacher": (
        lambda options: any(options.blocks("distill_coef")),
        "objective.distill_coef_reasoning (or _confidence)",
    ),
    "tis_mode": (lambda options: options.tis_level != "none", "objective.tis_level"),
    "tis_floor": (lambda options: options.tis_level != "none", "objective.tis_level"),
    "tis_cap": (lambda options: options.tis_level != "none", "objective.tis_level"),
    "overlong_penalty": (lambda options: options.overlong_buffer > 0, "objective.overlong_buffer"),
    "malformed_penalty": (
        lambda options: options.malformed_placement != "sentinel",
        "another objective.malformed_placement than sentinel, which scores c = -1 instead",
    ),
}


def _refuse_without_effect(
    resolved: ObjectiveConfig, method: Method, changed: Collection[str]
) -> None:
    """Raise :class:`UserError` for an option with another value than the method's or the preset's,
    if the mechanism that it is of is off.
    """
    for name, (is_read, needs) in _READ_WITH.items():
        if name in changed and not is_read(resolved):
            raise UserError(f"objective.{name} has no effect without {needs}")
    names = (f"advantage_normalization_{block}" for block in BLOCKS)
    normalizations = [getattr(resolved, name) for name in names if name in method.reads]
    for name in ("ddof", "eps"):
        if name in changed and normalizations and "std" not in normalizations:
            raise UserError(
                f"objective.{name} has no effect without objective.advantage_normalization=std"
            )
    baseline = resolved.options.get("confidence_baseline")
    normalization = resolved.advantage_normalization_confidence
    if baseline == "counterfactual" and normalization == "none":
        raise UserError(
            "objective.advantage_normalization_confidence=none: with "
            "confidence_baseline=counterfactual the baseline is subtracted; set mean"
        )


def _check_length(resolved: ObjectiveConfig) -> None:
    """Raise :class:`UserError` if an option needs the longest response, and it is not known."""
    if not needs_max_response_length(resolved):
        return
    if resolved.max_response_length > resolved.overlong_buffer:
        return
    needs_length = "loss_aggregation=constant"
    if resolved.overlong_buffer:
        needs_length = "overlong_buffer"
    raise UserError(
        f"objective.{needs_length} needs objective.max_response_length above "
        f"{resolved.overlong_buffer}, the longest response in tokens, not "
        f"{resolved.max_response_length}"
    )


def needs_max_response_length(config: ObjectiveConfig) -> bool:
    """Return whether an option of ``config`` is relative to the longest response that can be
    sampled.
    """
    return config.overlong_buffer > 0 or config.loss_aggregation == "constant"


def written(config: ObjectiveConfig) -> dict[str, Any]:
    """Return the section as ``config.yaml`` has it: every option that the method reads, resolved.
    Reading it again gives the same configuration.
    """
    method = find_method(config.name)
    resolved = resolve(config)
    section = {}
    for name in ObjectiveConfig.model_fields:
        if name in method.reads or name in ("name", "preset"):
            section[name] = getattr(resolved, name)
    if resolved.options:
        section["options"] = dict(resolved.options)
    return section


def _first(default: object) -> object:
    """Return the default of an option, which is the first of several choices."""
    if isinstance(default, tuple):
        return default[0]
    return default


def _check_own_option(name: str, value: object, default: object) -> None:
    """Raise :class:`UserError` unless ``value`` is of the same kind as ``default``: one of a
    tuple's choices, a finite number, a text, true or false.
    """
    if isinstance(default, tuple):
        if value not in default:
            raise UserError(
                f"objective.{name}={value}: expected one of {', '.join(map(str, default))}"
            )
        return
    if isinstance(default, int | float) and not isinstance(default, bool):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        good = is_number and math.isfinite(value)  # type: ignore[arg-type]
    else:
        good = isinstance(value, type(default))
    if not good:
        raise UserError(
            f"objective.{name}={value!r}: expected a value like its default, {default!r}"
        )


def as_method(config: ObjectiveConfig, name: str, **options: object) -> ObjectiveConfig:
    """Return ``config`` for the method ``name``, with ``options`` and without the options that this
    method ignores.
    """
    changes: dict[str, object] = dict.fromkeys(_ignored(config, find_method(name)))
    changes["name"] = name
    changes.update(options)
    return config.changed(**changes)


def _ignored(config: ObjectiveConfig, method: Method) -> list[str]:
    """Return the options that were set and that ``method`` does not read."""
    ignored = ignored_options(config.explicit, {*method.reads, "options"})
    ignored += [name for name in config.options if name not in method.own_options]
    return ignored
