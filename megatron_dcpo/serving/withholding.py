"""Which end of a text that is still growing may become the confidence block: it is withheld until
that is known.
"""

from __future__ import annotations

import re

_WORD = "confidence"
# possessive: what one part has taken, no other one is tried with, so that the time is linear
_SPACE = r"[ \t\r\n\f\v]*+"
_NUMBER = rf"-?[0-9]*+(?:\.[0-9]*+)?{_SPACE}"
_BEGUN_WORDS = "|".join(_WORD[:size] for size in range(1, len(_WORD)))
# what may follow a marker up to the end of the text
_REST = re.compile(
    rf"{_SPACE}(?:{_NUMBER}|{_BEGUN_WORDS}|{_WORD}{_SPACE}(?::{_SPACE}{_NUMBER})?)\Z",
    re.IGNORECASE | re.ASCII,
)
_RESCANNED = 1024  # characters from which on a withheld text is not looked at for each piece
_GROWTH = 1.25


def safe_length(text: str, marker: str) -> int:
    """Return how many characters of a text can be shown: those before the first place from which
    on it is the beginning of a marker, or a marker and the beginning of a confidence.
    """
    safe = len(text)
    for size in range(1, len(marker)):
        if text.endswith(marker[:size]):
            safe = len(text) - size
    at = text.find(marker)
    while at >= 0:
        if _REST.match(text, at + len(marker)):
            return min(at, safe)
        at = text.find(marker, at + 1)
    return safe


class Withheld:
    """The end of a text that nobody has seen yet. A long one is looked at whenever it has grown by
    a quarter, so that the time is linear in the text.
    """

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.pieces: list[str] = []
        self.size = 0
        self.looked_at = 0

    def add(self, piece: str) -> str:
        """Take a piece of the text, and return what can be shown now."""
        self.pieces.append(piece)
        self.size += len(piece)
        if self.size > _RESCANNED and self.size < _GROWTH * self.looked_at:
            return ""
        text = "".join(self.pieces)
        safe = safe_length(text, self.marker)
        self.pieces = [text[safe:]]
        self.size = self.looked_at = len(text) - safe
        return text[:safe]

    def take(self) -> str:
        """Return all of it, which is withheld no longer."""
        text = "".join(self.pieces)
        self.pieces = []
        self.size = self.looked_at = 0
        return text
