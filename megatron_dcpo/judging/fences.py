"""Fenced blocks of Markdown, found in one pass over bytes.

A block opens with three or more backticks and the rest of their line (the info string) at the start of a line; behind
text, as models write it, with a language as well (``Here it is: ```python``). It closes with the next line that begins
with as many backticks and then no word: what follows on that line (`` ```<conf> 0.8 ``) is text again. An opening fence
inside an open block is a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_OPENING = re.compile(rb"^[ \t]*(`{3,})([^`\n]*)\n|(?<!`)(`{3,})([\w+#.-]+)[ \t\r]*\n", re.MULTILINE)
_CLOSING = re.compile(rb"^[ \t]*(`{3,})(?![`\w])", re.MULTILINE)


class Fence(NamedTuple):
    """Offsets: backticks at ``start``, content in ``[inner, close)``, behind the closing backticks ``end``."""

    start: int
    inner: int
    close: int
    end: int
    info: str


def fences(text: bytes) -> Iterator[Fence]:
    """The complete blocks, in order."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        ticks, info = (opening[1], opening[2]) if opening[1] else (opening[3], opening[4])
        for closing in _CLOSING.finditer(text, opening.end()):
            if len(closing[1]) >= len(ticks):
                break
        else:
            return
        language = info.decode(errors="replace").strip()
        yield Fence(opening.start(), opening.end(), closing.start(), closing.end(), language)
        position = closing.end()


def last_fence(text: bytes) -> Fence | None:
    """The last complete block."""
    found = None
    for found in fences(text):  # noqa: B007
        pass
    return found
