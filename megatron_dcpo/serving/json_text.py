"""JSON as it is read and written here: what is written is valid, whatever was read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from megatron_dcpo.runtime.text import parse_json_as_it_is


def read_json(content: bytes) -> Any:  # noqa: ANN401 -- whatever JSON holds
    """Return the value of a JSON text, with null for numbers that a float cannot hold. Raises
    ValueError for anything else.
    """
    return parse_json_as_it_is(content, number=_finite)


def compact(value: object) -> bytes:
    """Return JSON without spaces, in ASCII, which any text can be written in."""
    return json.dumps(value, separators=(",", ":")).encode()


def objects_in(value: Any) -> Iterator[dict[str, Any]]:  # noqa: ANN401 -- whatever JSON holds
    """Yield every object of a value, at any depth, before those in it."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            yield one
            todo += one.values()
        elif isinstance(one, list):
            todo += one


def error_body(status: int, words: str) -> dict[str, Any]:
    """Return an error in the form of OpenAI's."""
    kind = "upstream_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": words, "type": kind, "param": None, "code": status}}


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None
