"""Arguments that the real functions do not have are refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

SIGNATURES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("signatures.json").read_text()
)


def checked(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a function or method whose real one has the parameters ``SIGNATURES[name]`` (without
    ``self``).
    """
    known = SIGNATURES[name]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            unknown = [option for option in options if option not in known]
            if unknown:
                raise TypeError(
                    f"{name} of Transformer Engine has no argument {', '.join(unknown)}"
                )
            return function(*args, **options)

        return call

    return wrap
