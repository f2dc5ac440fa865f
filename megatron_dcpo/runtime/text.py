"""Text that others wrote (models, data sets, servers, checkpoints): reading it as JSON and showing
it on a terminal. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError

# The levels of a JSON value. Python's own limit would only be met later, in any code that walks
# through a value.
DEEPEST = 100

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE_ESCAPE_IN_BYTES = re.compile(rb"\\u[dD][89a-fA-F]")
# C0, delete and C1 move the cursor and rename windows; the others reorder or break lines, or cannot
# be encoded.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: object, lines: bool = False) -> str:
    r"""Return ``text`` as a terminal may show it, with control characters, reordering marks and
    lone surrogates escaped (``\x1b``).

    With ``lines``, newlines and tabs stay, for our own text of several lines.
    """
    unsafe = _UNSAFE_IN_LINES if lines else _UNSAFE
    return unsafe.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def encodable(text: str) -> str:
    """Return ``text`` with U+FFFD for lone surrogates, which UTF-8 does not have."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def counted(number: int) -> str:
    """Return a large number in words: ``8.19 billion``, ``135 million``, ``125 thousand``."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= 0.9995 * size:  # which is written as 1 of it
            return f"{number / size:.3g} {word}"
    return str(number)


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - JSON of any shape
    """Return the JSON value in ``text``, with its strings :func:`encodable`. NaN and Infinity are
    numbers.

    Raises as :func:`parse_json_as_it_is`.
    """
    value = parse_json_as_it_is(text)
    if isinstance(text, str):
        has_surrogate = bool(_LONE_SURROGATE.search(text) or _SURROGATE_ESCAPE.search(text))
    else:
        has_surrogate = bool(_SURROGATE_ESCAPE_IN_BYTES.search(text))
    if has_surrogate:
        return _map_strings(value)
    return value


def parse_json_as_it_is(text: str | bytes, number: Callable[[str], Any] = float) -> Any:  # noqa: ANN401 - JSON of any shape
    """Return the JSON value in ``text``, with lone surrogates in its strings; ``number`` reads what
    is no integer.

    Raises :class:`ValueError` for text that is not JSON or not UTF-8, for a value of more than
    ``DEEPEST`` levels, and for an integer with more digits than Python converts.
    """
    try:
        value = json.loads(text, parse_float=number, parse_constant=number)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels deep") from None
    if isinstance(text, str):
        openings = text.count("[") + text.count("{")
    else:
        openings = text.count(b"[") + text.count(b"{")
    if openings > DEEPEST and not _is_shallow(value):
        raise ValueError(f"more than {DEEPEST} levels deep")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises :class:`UserError` for anything else."""
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object but {type(value).__name__}")
    return value


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        children: list[object] = []
        for parent in level:
            if isinstance(parent, dict):
                children.extend(parent.values())
            elif isinstance(parent, list):
                children.extend(parent)
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return True
    return False


def _map_strings(value: object) -> object:
    if isinstance(value, dict):
        return {encodable(key): _map_strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item) for item in value]
    if isinstance(value, str):
        return encodable(value)
    return value
