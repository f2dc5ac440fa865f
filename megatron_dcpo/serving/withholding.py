"""Which end of a text that is still growing may become the confidence block: it is withheld until
that is known.
"""

from __future__ import annotations

import re

_WORD = "confidence"
_SPACE = " \t\r\n\f\v"
_NUMBER = re.compile(r"-?[0-9]*(?:\.[0-9]*)?[ \t\r\n\f\v]*")


def safe_length(text: str, marker: str) -> int:
    """Return how many characters of a text can be shown: those before the first place from which
    on it is the beginning of a marker, or a marker and the beginning of a confidence.
    """
    at = text.find(marker[0])
    while at >= 0:
        if _may_become_block(text, at, marker):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)


def _may_become_block(text: str, at: int, marker: str) -> bool:
    if len(text) - at < len(marker):
        return marker.startswith(text[at:])
    if not text.startswith(marker, at):
        return False
    return _may_become_confidence(text[at + len(marker) :])


def _may_become_confidence(tail: str) -> bool:
    """Return whether what follows a marker is a confidence, or the beginning of one."""
    rest = tail.lstrip(_SPACE)
    word = rest[: len(_WORD)].lower()
    if _WORD.startswith(word) and len(word) < len(_WORD):
        return True
    if word == _WORD:
        rest = rest[len(_WORD) :].lstrip(_SPACE)
        if not rest:
            return True
        if rest[0] != ":":
            return False
        rest = rest[1:].lstrip(_SPACE)
    return _NUMBER.fullmatch(rest) is not None
