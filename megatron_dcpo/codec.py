"""One codec for a judged answer: what ``samples.jsonl`` of an evaluation, ``samples/step_*.jsonl``
of a run, the groups in a checkpoint and the input of ``dcpo objective`` have in common.

    Prompt, Response, Judgement, Measures  --to_row-->  one flat JSON object  --from_row-->  records

A row has the fields of its records under their own names, and the version of the codec. A field
that has its default is left out. The codec reads the names, types and limits of the fields from the
dataclasses, so a new field of a record is written and read without a change here.

The codec is not in ``types.py`` because it needs NumPy and ``types.py`` is
read first by everybody who wants to know what travels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType, NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from megatron_dcpo.types import Limits, Prompt, Response

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

VERSION = 2
LARGEST = 1e300  # beyond it sums would overflow
NO_TOKENS = np.empty(0)

Record = TypeVar("Record", bound="DataclassInstance")
Row = dict[str, object]

# What a record that was read from a file has in the fields that no file holds. Messages and tokens
# of a prompt are made from the data again, its tests are kept apart (``tests.jsonl.gz``), and the
# tokens of a response are in checkpoints only.
NOT_IN_FILES: Mapping[type, Mapping[str, object]] = MappingProxyType(
    {
        Prompt: {"messages": (), "token_ids": (), "tests": None},
        Response: {
            "token_ids": NO_TOKENS,
            "logprobs": NO_TOKENS,
            "top_logprobs": None,
            "token_ends": None,
            "experts": None,
            "loss_mask": None,
            "context_ids": None,
            "holder": None,
        },
    }
)


# ----------------------------------------------------------------------------------------- writing


def to_row(*records: DataclassInstance) -> Row:
    """Return the records of one judged answer as a flat JSON object."""
    row: Row = {"version": VERSION}
    for record in records:
        left_out = NOT_IN_FILES.get(type(record), {})
        fields = to_values(record)
        row.update({name: value for name, value in fields.items() if name not in left_out})
    return row


def to_values(
    record: DataclassInstance, array: Callable[[np.ndarray], object] | None = None
) -> Row:
    """Return the fields of a record that differ from their default, as plain values.

    ``array`` converts an array, for instance to a tensor; without it arrays stay as they are.
    """
    values: Row = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            values[field.name] = value if array is None else array(value)
        elif not _is_default(field, value):
            values[field.name] = _plain(value)
    return values


def keys_of(kind: type[DataclassInstance]) -> list[str]:
    """Return the keys that a row has of a record of a ``kind``."""
    left_out = NOT_IN_FILES.get(kind, {})
    return [field.name for field in dataclasses.fields(kind) if field.name not in left_out]


def as_read(record: Record) -> Record:
    """Return a record without what no file holds: as it will be once it is written and read."""
    return dataclasses.replace(record, **NOT_IN_FILES.get(type(record), {}))


def _is_default(field: dataclasses.Field[object], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    return value


# ----------------------------------------------------------------------------------------- reading


def check_version(row: Mapping[str, object]) -> None:
    """Raise ValueError if a row is not of :data:`VERSION`."""
    version = row.get("version")
    if version != VERSION or isinstance(version, bool):
        raise ValueError(f"version is {version!r:.40}, this release reads {VERSION}")


def from_row(kind: type[Record], row: Mapping[str, object]) -> Record:
    """Return the record of a ``kind`` that a row of :data:`VERSION` holds; other keys are ignored.

    Raises :class:`ValueError`, which names the field, for a value that is missing, of another type
    or outside its limits.
    """
    absent = NOT_IN_FILES.get(kind, {})
    hints = _type_hints(kind)
    values: Row = {}
    for field in dataclasses.fields(kind):
        name = field.name
        if name in absent and not isinstance(row.get(name), np.ndarray):
            values[name] = absent[name]
        elif name in row:
            try:
                values[name] = _converted(row[name], hints[name])
            except ValueError:
                raise ValueError(f"{name} is {row[name]!r:.40}") from None
        elif _is_required(field):
            raise ValueError(f"{name} is missing")
    return kind(**values)


@functools.cache
def _type_hints(kind: type) -> dict[str, object]:
    # types.py imports NumPy for a type checker only
    return get_type_hints(kind, localns={"np": np}, include_extras=True)


def _is_required(field: dataclasses.Field[object]) -> bool:
    no_default = field.default is dataclasses.MISSING
    return no_default and field.default_factory is dataclasses.MISSING


def _converted(value: object, hint: object) -> object:
    """Return a value of JSON, or of a checkpoint, as a type hint asks for. Raises ValueError."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    if origin in (Union, UnionType):
        return _first_that_fits(value, arguments)
    if origin is Annotated:
        return _within(_converted(value, arguments[0]), arguments[1])
    if origin is list and isinstance(value, list):
        return [_converted(item, arguments[0]) for item in value]
    if origin is tuple and isinstance(value, list | tuple):
        return _as_tuple(value, arguments)
    if hint is float:
        return _as_float(value)
    if not _fits(value, hint):
        raise ValueError(f"{value!r:.40} is not {hint}")
    return value


def _fits(value: object, hint: object) -> bool:
    """Return whether a value is of a type that needs no conversion."""
    origin = get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint in (NoneType, int, bool, str):  # a bool is an int for Python, not in JSON
        return type(value) is hint
    kind = hint if origin is None else origin
    return isinstance(kind, type) and isinstance(value, kind)


def _as_float(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST:
        return float(value)
    raise ValueError(f"{value!r:.40} is not a number that can be computed with")


def _first_that_fits(value: object, hints: tuple[object, ...]) -> object:
    for hint in hints:
        try:
            return _converted(value, hint)
        except ValueError:
            continue
    raise ValueError(f"{value!r:.40} is none of {hints}")


def _as_tuple(values: list[object] | tuple[object, ...], hints: tuple[object, ...]) -> object:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return tuple(_converted(item, hints[0]) for item in values)
    if len(values) != len(hints):
        raise ValueError(f"{len(values)} values, expected {len(hints)}")
    return tuple(_converted(item, hint) for item, hint in zip(values, hints, strict=True))


def _within(value: object, limits: Limits) -> object:
    assert isinstance(value, int | float)
    if not limits.least <= value <= limits.most:
        raise ValueError(f"{value} is outside {limits}")
    return value
