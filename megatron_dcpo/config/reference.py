"""Every option with type, default and meaning, read off the declarations: for ``docs/options.md``
and ``dcpo config``.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

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
from megatron_dcpo.errors import one_line
from megatron_dcpo.objectives import METHODS
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
_KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


@dataclass(frozen=True)
class Option:
    """``name``: dotted, as a user writes it. ``methods``: those that read it, where not all do."""

    name: str
    kind: str
    default: str
    meaning: str
    methods: tuple[str, ...] = ()


def sections() -> dict[str, str]:
    """Return every section with what it holds, one line each."""
    return {
        name: one_line(kind.__doc__).partition(". ")[0].rstrip(".")
        for name, kind in SECTIONS.items()
    }


def options(section: str) -> list[Option]:
    """Return the options of a section, in the order of their declaration."""
    prefix = f"{section}." if section else ""
    found, meanings = [], _meanings(SECTIONS[section])
    for name, field in _fields(SECTIONS[section]).items():
        if meaning := meanings.get(name):  # not of a section of sections
            default = field.get_default(call_default_factory=True)
            methods = _methods(name) if section == "objective" else ()
            shown = "required" if field.is_required() else _shown(default)
            kind = _kind(field.annotation, [field])
            found.append(Option(prefix + name, kind, shown, one_line(meaning), methods))
    return found + list(_own_options()) if section == "objective" else found


def _own_options() -> Iterator[Option]:
    """Yield the options that the package's methods declare as their own."""
    names = dict.fromkeys(name for method in METHODS.values() for name in method.own_options)
    for name in names:
        owners = {key: method for key, method in METHODS.items() if name in method.own_options}
        method = next(iter(owners.values()))
        default = method.own_options[name]
        kind = Literal[default] if isinstance(default, tuple) else type(default)
        first = default[0] if isinstance(default, tuple) else default
        yield _option(
            f"objective.{name}", kind, first, method.meanings.get(name, ""), tuple(owners)
        )


def _methods(name: str) -> tuple[str, ...]:
    """Return the methods that read an option of all methods; nothing where every one does."""
    readers = tuple(key for key, method in METHODS.items() if name in method.reads)
    return readers if len(readers) < len(METHODS) else ()


def _option(
    name: str, kind: Any, default: Any, meaning: str, methods: tuple[str, ...] = ()
) -> Option:
    return Option(name, _kind(kind), _shown(default), one_line(meaning), methods)


def _fields(section: Any) -> Mapping[str, FieldInfo]:
    return section.model_fields if section is ObjectiveConfig else section.__pydantic_fields__


def _meanings(section: type) -> dict[str, str]:
    """Return the text below each option of a class."""
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(declared, ast.ClassDef)
    found = {}
    for statement, after in zip(declared.body, declared.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
            found[ast.unparse(statement.target)] = str(ast.literal_eval(after.value))
    return found


def _kind(annotation: Any, limits: Sequence[Any] = ()) -> str:
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
    return " ".join([_KINDS.get(annotation, "mapping"), " and ".join(words)]).strip()


def _values(bounds: Iterable[Any], name: str) -> list[Any]:
    return [getattr(one, name) for one in bounds if getattr(one, name, None) is not None]


def _shown(value: Any) -> str:
    """Return a default as a YAML file has it, or in words."""
    if value is None or value == {}:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "empty"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
