"""Text that others wrote (models, data sets, servers, checkpoints): read as JSON, and shown on a
terminal. No torch.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError

# levels of a JSON value; Python's own limit would be met later, wherever a value is walked through
DEEPEST = 100

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]"), re.compile(rb"\\u[dD][89a-fA-F]")
# C0, delete and C1 move the cursor and name windows; the others reorder or break lines, or cannot
# be encoded.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: object, lines: bool = False) -> str:
    r"""Return ``text`` as a terminal may show it: control characters, reordering marks and lone
    surrogates as ``\x1b``.

    ``lines``: newlines and tabs stay, for text of several lines that is ours.
    """
    unsafe = _UNSAFE_IN_LINES if lines else _UNSAFE
    return unsafe.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def encodable(text: str) -> str:
    """Return ``text`` without lone surrogates, which UTF-8 does not have: U+FFFD in their place."""
    return _LONE_SURROGATE.sub("\ufffd", text)


def counted(number: int) -> str:
    """Return a large number in words: ``8.19 billion``, ``135 million``, ``125 thousand``."""
    for size, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return str(number)


def parse_json(text: str | bytes) -> Any:
    """Return the JSON value in ``text``, its strings :func:`encodable`. NaN and Infinity are
    numbers.

    Raises :class:`ValueError` for text that is not JSON or not UTF-8, for a value of more than
    ``DEEPEST`` levels, and for a whole number of more digits than Python converts.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"more than {DEEPEST} levels deep") from None
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) > DEEPEST and not _is_shallow(value):  # type: ignore[arg-type]
        raise ValueError(f"more than {DEEPEST} levels deep")
    literal = isinstance(text, str) and _LONE_SURROGATE.search(text)
    if literal or _SURROGATE_ESCAPE[isinstance(text, bytes)].search(text):  # type: ignore[arg-type]
        return _map_strings(value)
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises :class:`UserError` for anything else."""
    try:
        value = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            line = f":{error.lineno}"
        else:
            line = ""
        raise UserError(f"{path}{line}: not valid JSON ({getattr(error, 'msg', error)})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object but {type(value).__name__}")
    return value


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        inner = (
            c
            for v in level
            for c in (v.values() if isinstance(v, dict) else v if isinstance(v, list) else ())
        )
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return True
    return False


def _map_strings(value: Any) -> Any:
    if isinstance(value, dict):
        return {encodable(key): _map_strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_map_strings(item) for item in value]
    return encodable(value) if isinstance(value, str) else value
