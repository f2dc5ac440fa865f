"""Brace-matched ``\\boxed{...}``, found in one pass over text or bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

# An escaped brace (\\{) is no brace of TeX's; an escaped backslash hides nothing behind it.
_TOKEN = re.compile(rb"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


class Box(NamedTuple):
    """Offsets of a complete box: ``\\boxed{`` starts at ``start``, its content is ``[inner, end - 1)``."""

    start: int
    inner: int
    end: int


def last_box(text: bytes) -> Box | None:
    """The complete box that opens last, or None. Linear, however many boxes stay open."""
    best: Box | None = None
    open_braces: list[tuple[int, int, bool]] = []
    for token in _TOKEN.finditer(text):
        if token[0] == b"}":
            if open_braces:
                start, inner, boxed = open_braces.pop()
                if boxed and (best is None or start > best.start):
                    best = Box(start, inner, token.end())
        elif token[0].endswith(b"{") and token[0] != b"\\{":
            open_braces.append((token.start(), token.end(), token[0] != b"{"))
    return best
