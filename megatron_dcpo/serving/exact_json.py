"""JSON that is read, changed in a few places and written again: what was valid stays valid, and a
number that a float cannot hold keeps its text.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

# a number that a float or Python's limit of digits may not hold
_LARGE = re.compile(r"[eE]\+?[0-9]{3}|[0-9]{200}")
# characters from which on numbers are read by Python, in which other threads get their turns
_LONG = 1 << 20
_DIGITS = 4000  # Python refuses to read integers of more than 4300


class _Large(float):
    """A number beyond the range of a float: infinite here, with the ``text`` that JSON has."""

    text: str


def loads(content: bytes | str) -> Any:  # noqa: ANN401 -- whatever JSON holds
    """Return the value of a JSON text. Raises ValueError for anything else, nested too deeply for
    one.
    """
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        if len(text) < _LONG and _LARGE.search(text) is None:
            return json.loads(text)
        return json.loads(text, parse_float=_number, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def compact(value: object) -> bytes:
    """Return JSON without spaces, in ASCII, which any text can be written in. NaN and infinity,
    which JSON does not have, become null.
    """
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return "".join(_written(value)).encode()


def _number(text: str) -> float:
    value = float(text)
    return _large(text) if math.isinf(value) else value


def _integer(text: str) -> float:
    return _large(text) if len(text) > _DIGITS else int(text)


def _large(text: str) -> _Large:
    value = _Large("-inf" if text.startswith("-") else "inf")
    value.text = text
    return value


def _written(value: object) -> list[str]:
    """Return the pieces of a JSON text, number by number."""
    if isinstance(value, _Large):
        return [value.text]
    if isinstance(value, float) and not math.isfinite(value):
        return ["null"]
    if isinstance(value, dict):
        pieces = ["{"]
        for name, one in value.items():
            pieces += [json.dumps(name), ":", *_written(one), ","]
        pieces[-1:] = ["}"] if value else ["{", "}"]
        return pieces
    if isinstance(value, list):
        pieces = ["["]
        for one in value:
            pieces += [*_written(one), ","]
        pieces[-1:] = ["]"] if value else ["[", "]"]
        return pieces
    return [json.dumps(value)]
