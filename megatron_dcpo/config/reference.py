"""Every option with type, default and meaning, read off the declarations: for ``docs/options.md``
and ``dcpo config``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from megatron_dcpo.config.evaluation_sections import (
    EndpointConfig,
    EngineConfig,
    EvaluateConfig,
    EvaluatedModelConfig,
    EvaluationConfig,
    PromptConfig,
)
from megatron_dcpo.config.parallel import ParallelConfig, PlannedOptions
from megatron_dcpo.config.sections import (
    AdapterConfig,
    Config,
    DataConfig,
    JudgingConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    RolloutConfig,
    SourceConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron_dcpo.config.supervised_sections import (
    DemonstrationsConfig,
    SupervisedLoopConfig,
    SupervisedLossConfig,
    SupervisedValidationConfig,
)
from megatron_dcpo.errors import one_line
from megatron_dcpo.objectives import registered_methods
from megatron_dcpo.objectives.options import ObjectiveConfig

# In the order of the page. ``data.path[]``: of each source in a list.
SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "": Config,
        "model": ModelConfig,
        "model.adapter": AdapterConfig,
        "data": DataConfig,
        "data.path[]": SourceConfig,
        "rollout": RolloutConfig,
        "judging": JudgingConfig,
        "objective": ObjectiveConfig,
        "optimizer": OptimizerConfig,
        "training": TrainingConfig,
        "evaluation": ValidationConfig,
        "logging": LoggingConfig,
        "parallel": ParallelConfig,
        "parallel.megatron": PlannedOptions,
    }
)
# What dcpo evaluate reads. ``judging`` is the section of a training.
EVALUATE_SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "evaluate": EvaluateConfig,
        "evaluate.model": EvaluatedModelConfig,
        "evaluate.data": PromptConfig,
        "evaluate.rollout": EngineConfig,
        "evaluate.evaluation": EvaluationConfig,
        "evaluate.endpoint": EndpointConfig,
    }
)
# The sections that dcpo sft alone has. It shares ``model``, ``parallel``, ``optimizer`` and
# ``logging`` with dcpo train.
SUPERVISED_SECTIONS: Mapping[str, type] = MappingProxyType(
    {
        "sft.data": DemonstrationsConfig,
        "sft.objective": SupervisedLossConfig,
        "sft.training": SupervisedLoopConfig,
        "sft.evaluation": SupervisedValidationConfig,
    }
)
_ALL: Mapping[str, type] = MappingProxyType(
    {**SECTIONS, **EVALUATE_SECTIONS, **SUPERVISED_SECTIONS}
)
_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


@dataclass(frozen=True)
class Option:
    """One option: ``name`` is dotted, as a user writes it; ``methods`` are the methods that read
    it, if not all do.
    """

    name: str
    kind: str
    default: str
    meaning: str
    methods: tuple[str, ...] = ()


def sections() -> dict[str, str]:
    """Return every section with what it holds, one line each."""
    return {
        name: one_line(kind.__doc__).partition(". ")[0].rstrip(".") for name, kind in _ALL.items()
    }


def options(section: str) -> list[Option]:
    """Return the options of a section, in the order of their declaration."""
    declared = _ALL[section]
    meanings = _meanings(declared)
    is_objective = section == "objective"
    found = []
    for name, field in _fields(declared).items():
        meaning = meanings.get(name)
        if meaning is None:  # a section
            continue
        option = Option(
            name=f"{section}.{name}" if section else name,
            kind=_kind(field.annotation, [field]),
            default="required" if field.is_required() else _shown(_default(field)),
            meaning=one_line(meaning),
            methods=_methods(name) if is_objective else (),
        )
        found.append(option)
    return [*found, *_own_options()] if is_objective else found


def _default(field: FieldInfo) -> object:
    default = field.get_default(call_default_factory=True)
    return default.default if isinstance(default, dataclasses.Field) else default


def _own_options() -> Iterator[Option]:
    """Yield the options that the package's methods declare as their own."""
    names = dict.fromkeys(
        name for method in registered_methods().values() for name in method.own_options
    )
    for name in names:
        owners = {
            key: method
            for key, method in registered_methods().items()
            if name in method.own_options
        }
        method = next(iter(owners.values()))
        default = method.own_options[name]
        kind = Literal[default] if isinstance(default, tuple) else type(default)
        first = default[0] if isinstance(default, tuple) else default
        yield _option(
            f"objective.{name}", kind, first, method.meanings.get(name, ""), tuple(owners)
        )


def _methods(name: str) -> tuple[str, ...]:
    """Return the methods that read an option of all methods; nothing if every one does."""
    methods = registered_methods()
    readers = tuple(key for key, method in methods.items() if name in method.reads)
    return readers if len(readers) < len(methods) else ()


def _option(
    name: str, kind: object, default: object, meaning: str, methods: tuple[str, ...] = ()
) -> Option:
    return Option(name, _kind(kind), _shown(default), one_line(meaning), methods)


def _fields(section: object) -> Mapping[str, FieldInfo]:
    if section is ObjectiveConfig:
        return ObjectiveConfig.model_fields
    fields: Mapping[str, FieldInfo] = getattr(section, "__pydantic_fields__")  # noqa: B009
    return fields


def _meanings(section: type) -> dict[str, str]:
    """Return the text below each option of a class and of the classes it extends."""
    found: dict[str, str] = {}
    for part in reversed(section.__mro__):
        if part.__module__.startswith("megatron_dcpo."):
            found |= _own_meanings(part)
    return found


def _own_meanings(section: type) -> dict[str, str]:
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for statement, after in zip(declared.body, declared.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            found[ast.unparse(statement.target)] = str(ast.literal_eval(after.value))
    return found


def _kind(annotation: object, limits: Sequence[Any] = ()) -> str:
    """Return a type and its range in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0], [*limits, *inner[1:]])
    if origin is Literal:
        return ", ".join(map(str, inner))
    if origin in (Union, UnionType):
        return " or ".join(_kind(one) for one in inner if one is not NoneType)
    if origin is tuple:
        return f"list of {_kind(inner[0])}"
    if origin is dict:
        return "mapping"
    bounds = [
        limit for one in limits for limit in (one.metadata if isinstance(one, FieldInfo) else [one])
    ]
    words = [f"{sign} {value}" for name, sign in _BOUNDS for value in _values(bounds, name)]
    word = _KINDS.get(annotation, "mapping") if isinstance(annotation, type) else "mapping"
    return " ".join([word, " and ".join(words)]).strip()


def _values(bounds: Iterable[Any], name: str) -> list[Any]:
    return [getattr(one, name) for one in bounds if getattr(one, name, None) is not None]


def _shown(value: object) -> str:
    """Return a default as a YAML file has it, or in words."""
    if value is None or value == {}:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
