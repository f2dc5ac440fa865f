"""What a run is: frozen dataclasses, filled from a YAML file and dotted overrides
(``objective.lam=1``), validated.

OmegaConf reads YAML and dotted overrides, pydantic checks types and ranges. Parallelism and
optimizer options carry Megatron's names, method options the paper's. Unknown keys are errors that
name the nearest valid key.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from yaml import YAMLError

from megatron_dcpo import objectives
from megatron_dcpo.config.hints import ELSEWHERE
from megatron_dcpo.config.parallel import ParallelConfig, PlannedOptions
from megatron_dcpo.config.paths import seen_from
from megatron_dcpo.config.rules import check_configuration
from megatron_dcpo.config.sections import (
    AdapterConfig,
    Config,
    DataConfig,
    JudgingConfig,
    LoggingConfig,
    LoopConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron_dcpo.errors import UserError, nearest, one_line, validated_name, validation_message
from megatron_dcpo.objectives.options import ObjectiveConfig, option_names
from megatron_dcpo.runtime import hub
from megatron_dcpo.runtime.nearby_paths import beside, places
from megatron_dcpo.sandbox.limits import CodeLimits

__all__ = [
    "AdapterConfig",
    "CodeLimits",
    "Config",
    "DataConfig",
    "JudgingConfig",
    "LoggingConfig",
    "LoopConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RolloutConfig",
    "RunConfig",
    "SourceConfig",
    "TrainingConfig",
    "ValidationConfig",
    "as_dict",
    "flat",
    "load_config",
    "to_yaml",
    "validate",
]


Built = TypeVar("Built")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a training by RL: :func:`read` and :func:`validate`."""
    return read(path, overrides, validate)


def read(
    path: str | Path, overrides: Sequence[str], validated: Callable[[object, str], Built]
) -> Built:
    """Read ``path``, apply dotted ``overrides`` in order, and return what ``validated`` makes of
    the values and their source. Raises :class:`UserError`, one line per call.

    A file may name another as ``base``: it then holds only what differs. Paths in a file:
    ``config/paths.py``.
    """
    try:
        written: Any = OmegaConf.to_container(_read(Path(path)))
        for override in overrides:
            name, value = _parsed(override)
            written = overridden(written, name, value)
        values = OmegaConf.to_container(OmegaConf.create(written), resolve=True)
    except (
        OmegaConfBaseException,
        YAMLError,
        ValueError,
        TypeError,
        AttributeError,
        OSError,
    ) as error:
        raise UserError(f"{path}: {one_line(error, 500)}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None
    try:
        return validated(values, str(path))
    except UserError as error:
        message = str(error)
        for override in reversed(overrides):  # the file is not to blame
            name = re.sub(r"\[(\w+)\]", r".\1", override.partition("=")[0])
            if name in message or f"unknown key {name.partition('.')[0]};" in message:
                raise UserError(message.replace(f"{path}: ", f"{override}: ", 1)) from None
        raise


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the nested values of a configuration file and its bases. Raises :class:`UserError`."""
    try:
        values = OmegaConf.to_container(_read(Path(path)), resolve=True)
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{path}: {one_line(error, 500)}") from None
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}


def _read(path: Path, including: tuple[Path, ...] = ()) -> DictConfig:
    if not path.is_file():
        raise UserError(f"config file {path} does not exist{places(path)}")
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise UserError(
            f"{path}: a configuration is a YAML file (.yaml); data belongs to data.path"
        )
    if path.resolve() in including:
        raise UserError(f"config file {path} is its own base")
    values = OmegaConf.load(path)
    if not isinstance(values, DictConfig):
        raise UserError(f"{path}: expected a mapping of sections, found a list")
    values = OmegaConf.create(seen_from(OmegaConf.to_container(values), path))  # type: ignore[arg-type]
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UserError(f"{path}: base must be the name of a file")
    merged = OmegaConf.merge(
        _read(Path(beside(base, path.parent)), (*including, path.resolve())), values
    )
    assert isinstance(merged, DictConfig)
    return merged


def validate(values: object, source: str = "config") -> Config:
    """Turn plain dictionaries into a :class:`Config`. Raises :class:`UserError` for the first thing
    wrong.
    """
    if not isinstance(values, dict):
        raise UserError(f"{source}: expected a mapping of sections, found {type(values).__name__}")
    data = values.get("data")
    if isinstance(data, dict) and "examples_per_step" in data:
        raise UserError(
            f"{source}: a configuration of dcpo sft (data.examples_per_step), which trains on "
            "demonstrations; this reads one of dcpo train"
        )
    config = checked(values, Config, source)
    config = dataclasses.replace(config, objective=_completed_objective(config))
    check_configuration(config, source)
    return config


def _completed_objective(config: Config) -> ObjectiveConfig:
    """Return the objective with the options that follow from the rollout."""
    objective = config.objective
    if objectives.needs_max_response_length(objective) and not objective.max_response_length:
        objective = objective.changed(max_response_length=config.rollout.max_response_length)
    if (
        config.rollout.filter_groups == "reasoning"
        and "block_groups" not in objective.explicit
        and "block_groups" in objectives.find_method(objective.name).reads
    ):
        objective = objective.changed(block_groups="signal")
    return objective


def checked(values: dict[Any, Any], kind: type[Built], source: str) -> Built:
    """Return nested ``values`` as the dataclass ``kind`` of sections, types and ranges checked.

    Raises :class:`UserError` for the first thing wrong, with the ``source`` of the values.
    """
    _check_keys(values, kind, source)
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        if error.errors()[0]["type"] == "missing":
            where = validated_name(error)
            raise UserError(
                f"{source}: {where} is required; add it to the file or pass {where}=..."
            ) from None
        raise UserError(f"{source}: {validation_message(error)}") from None
    except ValueError as error:
        raise UserError(f"{source}: {one_line(error)}") from None


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of overrides ``section.key=value`` by dotted name, read as YAML. Raises
    :class:`UserError`.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        try:
            name, value = _parsed(override)
            read = OmegaConf.to_container(OmegaConf.create({"value": value}), resolve=True)
            values[name] = read["value"]  # type: ignore[index, call-overload]
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            raise UserError(f"{override}: {one_line(error, 500)}") from None
    return values


def _parsed(override: str) -> tuple[str, Any]:
    """Return name and value of an override, the value read as YAML. Raises :class:`UserError`."""
    name, equal, text = override.partition("=")
    if not (name and equal):
        raise UserError(f"override {override!r} is not of the form section.key=value")
    try:
        values = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (OmegaConfBaseException, YAMLError, ValueError, TypeError) as error:
        raise UserError(f"{override}: {one_line(error, 500)}") from None
    assert isinstance(values, dict)
    return name, values["value"]


def overridden(values: object, name: str, value: object) -> dict[str, Any]:
    """Return nested ``values`` with another ``value`` of the dotted ``name``.

    A number in the name is a place in a list, counted from 0: ``data.path.0.weight`` or
    ``data.path[0].weight``. A mapping is merged into a mapping, except an empty one, which clears
    it; anything else is replaced.

    Raises :class:`UserError` if a part of the name is no place in a list, or is below a value that
    has no parts.
    """
    parts = re.sub(r"\[(\w+)\]", r".\1", name).split(".")
    changed = _overridden(values, parts, value, ())
    assert isinstance(changed, dict)
    return changed


def _overridden(
    holder: object, parts: Sequence[str], value: object, above: tuple[str, ...]
) -> object:
    if not parts:
        both = isinstance(holder, Mapping) and isinstance(value, Mapping) and value
        return merged(holder, value) if both else value  # type: ignore[arg-type]
    key, *rest = parts
    name = ".".join((*above, *parts))
    parent = ".".join(above)
    if isinstance(holder, list | tuple):
        if not (key.isdecimal() and int(key) < len(holder)):
            raise UserError(
                f"override {name}: {parent} is a list of {len(holder)}; name a place in it, "
                f"{parent}.0 to {parent}.{len(holder) - 1}, or give the whole list"
            )
        entries = list(holder)
        entry = entries[int(key)]
        entries[int(key)] = _overridden(entry, rest, value, (*above, key))
        return entries
    if not isinstance(holder, Mapping | None):
        raise UserError(
            f"override {name}: {parent} is {holder!r:.80}, which has no {key}; give "
            f"{parent}=... as a whole"
        )
    before = holder or {}
    inner = _overridden(before.get(key), rest, value, (*above, key))
    return {**before, key: inner}


def merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values, overridden by ``over``."""
    result = dict(values)
    for key, value in over.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration, defaults included, as ``config.yaml`` of a run directory has
    it.
    """
    return OmegaConf.to_yaml(OmegaConf.create(as_dict(config)))


def as_dict(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as plain dictionaries, the objective's options resolved, without
    what is not set, and a model of the hub by its name.
    """
    values = without_none(dataclasses.asdict(config))
    values["model"]["path"] = hub.name_of(config.model.path)
    if isinstance(config, Config):
        values["objective"] = objectives.written(config.objective)
    return values


def flat(values: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of everything set in nested mappings."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif values is not None:
        yield prefix, values


def without_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries without the keys whose value is None."""
    return {
        k: without_none(v) if isinstance(v, dict) else v for k, v in values.items() if v is not None
    }


def _check_keys(values: dict[Any, Any], kind: type, source: str) -> None:
    """Refuse unknown keys first: pydantic would report them last, and without the nearest valid
    name.
    """
    unknown = next(_unknown_keys(values, kind, ()), None)
    if unknown is None:
        return
    prefix, key, section = unknown
    known = section_fields(section)
    near = nearest(key, known, cutoff=0.7)
    here = ".".join((*prefix, near)) if near else None
    meant = _named_elsewhere(key, kind) or here or _of_another_section(key, kind)
    hint = f"did you mean {meant}?" if meant else f"valid keys: {', '.join(sorted(known))}"
    raise UserError(f"{source}: unknown key {'.'.join((*prefix, key))}; {hint}")


def _unknown_keys(
    values: Mapping[Any, Any], kind: type, prefix: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str, type]]:
    """Yield each key of ``values`` that the section ``kind`` does not have: the names of the
    sections around it, the key, and its section.
    """
    known = section_fields(kind)
    for key, value in values.items():
        if key not in known:
            yield prefix, str(key), kind
            continue
        section = next((t for t in (known[key], *get_args(known[key])) if section_fields(t)), None)
        if section is not None and isinstance(value, dict):
            yield from _unknown_keys(value, section, (*prefix, str(key)))


def section_fields(kind: object) -> dict[str, Any]:
    """Return the keys of a section with their types; nothing for what is not a section."""
    if kind is ObjectiveConfig:
        return dict.fromkeys(option_names())
    return {
        name: field.annotation for name, field in getattr(kind, "__pydantic_fields__", {}).items()
    }


def _named_elsewhere(key: str, kind: type) -> str | None:
    """Return the dotted name in the configuration ``kind`` of an option that other trainers call
    ``key``; None if it has none.
    """
    ours = ELSEWHERE.get(key)
    if ours is None or ours.partition(".")[0] not in section_fields(kind):
        return None
    return ours


def _of_another_section(key: str, kind: type) -> str | None:
    """Return the dotted name of an option that the configuration ``kind`` has in another section;
    None if it has no option ``key``.
    """
    for name, section in section_fields(kind).items():
        if section is ParallelConfig and key in section_fields(PlannedOptions):
            return f"{name}.megatron.{key}"
        if key in section_fields(section):
            return f"{name}.{key}"
    return None
