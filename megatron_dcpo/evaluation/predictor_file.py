"""The file of a post-hoc predictor, read by a schema: its parts, their sizes, types and shapes are
looked at before anything is unpacked, and their values before anything is predicted.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

import numpy as np
from numpy.lib import format as npy
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron_dcpo.errors import UserError, one_line

VERSION = 1
_MOST_BYTES = 256 << 20  # of all parts: a ConfClass of width 2048 has 17 MB
_MOST_PARTS = 100
_HEADER = "header"
_KINDS = "fiub"  # of numbers
_TEXTS = ("header", "tasks")

Text = Annotated[str, Field(min_length=1, max_length=1 << 20)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class FittedOnHeader(_Strict):
    """What ``FittedOn`` is in a file."""

    models: tuple[Text, ...] = Field(min_length=1)
    templates: tuple[Text, ...] = Field(min_length=1)
    instructions: tuple[tuple[str, ...], ...]
    temperatures: tuple[Number, ...] = Field(min_length=1)
    top_ps: tuple[Number, ...] = Field(min_length=1)
    top_ks: tuple[int, ...] = Field(min_length=1)
    markers: tuple[Text, ...] = Field(min_length=1)
    forms: tuple[Text, ...] = Field(min_length=1)
    thinking: tuple[Text, ...] = ()
    weights: tuple[Text, ...] = ()


class Header(_Strict):
    """The header of a file. Files of before there were versions have none."""

    version: int = VERSION
    method: Text
    source: Text
    fitted_on: FittedOnHeader | None = None
    finish_reasons: tuple[Text, ...] = ()


class _WrongFileError(Exception):
    """A file that is not a predictor's; its words say why."""


def read_file(path: str | Path) -> tuple[Header, dict[str, np.ndarray]]:
    """Return the header of a predictor's file, and its arrays by name. Raises :class:`UserError` in
    one line for anything that is not such a file.
    """
    try:
        with Path(path).open("rb") as file:
            arrays = _arrays(file)
        header = _header(arrays.pop(_HEADER))
        _check_version(header)
        return header, arrays
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except Exception as error:  # whatever zipfile, numpy or a decoder raises for other bytes
        why = str(error)
        if not isinstance(error, _WrongFileError):
            why = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{path}: not a predictor of dcpo calibrate ({one_line(why, 300)})"
        ) from None


def _arrays(file: IO[bytes]) -> dict[str, np.ndarray]:
    """Return the arrays of a file, which are unpacked when all of them have been looked at."""
    with zipfile.ZipFile(file) as parts:
        members = parts.infolist()
        size = sum(member.file_size for member in members)
        if len(members) > _MOST_PARTS or size > _MOST_BYTES:
            raise _WrongFileError(
                f"{len(members)} parts of {size} bytes, more than a predictor has"
            )
        names = [member.filename.removesuffix(".npy") for member in members]
        if len(set(names)) < len(names) or _HEADER not in names:
            raise _WrongFileError("it has no header, or one part twice")
        for name, member in zip(names, members, strict=True):
            with parts.open(member) as part:
                _check_layout(name, part, member.file_size)
        found = {}
        for name, member in zip(names, members, strict=True):
            with parts.open(member) as part:
                found[name] = npy.read_array(part, allow_pickle=False)
    return found


def _check_layout(name: str, part: IO[bytes], size: int) -> None:
    """Raise :class:`_WrongFileError` for an array that is not of the type, or not as large as its
    own header says.
    """
    version = npy.read_magic(part)
    if version == (1, 0):
        shape, _, dtype = npy.read_array_header_1_0(part)
    elif version == (2, 0):
        shape, _, dtype = npy.read_array_header_2_0(part)
    else:
        raise _WrongFileError(f"{name} is an array of the unknown version {version}")
    kinds = "U" if name in _TEXTS else _KINDS
    if dtype.kind not in kinds:
        raise _WrongFileError(f"{name} has the type {dtype}")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize + part.tell() != size:
        raise _WrongFileError(f"{name} has not the size of its shape {shape}")


def _header(array: np.ndarray) -> Header:
    if array.shape != ():
        raise _WrongFileError("the header is not one text")
    try:
        return Header.model_validate_json(str(array))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _WrongFileError(f"header {place}: {first['msg']}") from None


def _check_version(header: Header) -> None:
    if header.version != VERSION:
        raise _WrongFileError(
            f"it has the version {header.version}, this release reads {VERSION}; fit it again"
        )


# ------------------------------------------------------------------------------------------ arrays

Arrays = Mapping[str, np.ndarray]

# for each method, the shape of each array; a letter is a size that all arrays share
_SCALE = {"mean": "D", "deviation": "D"}
_SHAPES: Mapping[str, Mapping[str, str]] = {
    "temperature": {"temperature": ""},
    "platt": {"slope": "", "intercept": ""},
    "isotonic": {"x": "K", "y": "K"},
    "logistic": {**_SCALE, "slopes": "D", "intercept": ""},
    "confclass": {
        **_SCALE,
        "weight1": "WD",
        "bias1": "W",
        "weight2": "WW",
        "bias2": "W",
        "weight3": "1W",
        "bias3": "1",
    },
}
_OF_TASKS = {"tasks": "T", "task_intercepts": "T", "task_slopes": "T"}
_RECORD = {
    "record/held_out_confidences": "H",
    "record/held_out_correct": "H",
    "record/counts": "B",
}
_HELD_OUT_PROBLEMS = "record/held_out_problems"  # files of earlier releases have none


@dataclass(frozen=True)
class PredictorInputs:
    """What a predictor reads of each answer: a ``count`` of numbers, and the task."""

    count: int
    with_task: bool


def check_arrays(method: str, inputs: PredictorInputs, arrays: Arrays) -> None:
    """Raise :class:`UserError`, without the name of the file, unless the arrays are those of a
    method that reads ``inputs``.
    """
    shapes = dict(_SHAPES[method])
    if inputs.with_task:
        shapes |= _OF_TASKS
    if any(name.startswith("record/") for name in arrays):
        shapes |= _RECORD
        if _HELD_OUT_PROBLEMS in arrays:
            shapes[_HELD_OUT_PROBLEMS] = "H"
    if set(shapes) != set(arrays):
        wrong = ", ".join(sorted(set(shapes) ^ set(arrays)))
        raise UserError(f"arrays are missing, or too many: {wrong}")
    sizes = {"1": 1, "D": inputs.count, "B": 20}
    for name, letters in shapes.items():
        expected = tuple(
            sizes.setdefault(letter, size)
            for letter, size in zip(letters, arrays[name].shape, strict=False)
        )
        if arrays[name].shape != expected or len(letters) != len(expected):
            raise UserError(f"{name} has the shape {arrays[name].shape}")
        if name != "tasks" and not np.isfinite(arrays[name]).all():
            raise UserError(f"{name} has values that are no numbers")
    _check_values(arrays)


def _check_values(arrays: Arrays) -> None:
    """Raise :class:`UserError` for numbers that a fit does not leave."""
    for name in ("deviation", "temperature"):
        if name in arrays and not (arrays[name] > 0).all():
            raise UserError(f"{name} is not above 0")
    if "x" in arrays and (not arrays["x"].size or (np.diff(arrays["x"]) < 0).any()):
        raise UserError("x does not grow")
    for name in ("y", "record/held_out_confidences"):
        if name in arrays and ((arrays[name] < 0) | (arrays[name] > 1)).any():
            raise UserError(f"{name} is not in [0, 1]")
    correct = arrays.get("record/held_out_correct", np.empty(0))
    if not np.isin(correct, (0, 1)).all():
        raise UserError("record/held_out_correct is neither 0 nor 1")
    for name in ("record/counts", _HELD_OUT_PROBLEMS):
        counts = arrays.get(name, np.empty(0))
        if (counts < 0).any() or (counts != np.round(counts)).any():
            raise UserError(f"{name} are no counts")
