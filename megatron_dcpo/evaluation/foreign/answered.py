"""One answered problem of somebody else's log, and how verdicts and texts are read in all logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.data.chat_template import end_token_of
from megatron_dcpo.errors import UserError

# Inspect's letters as its value_to_float reads them (P is partial, N no answer), and words
_VERDICTS = {
    "c": 1.0,
    "correct": 1.0,
    "true": 1.0,
    "yes": 1.0,
    "p": 0.5,
    "partial": 0.5,
    "i": 0.0,
    "incorrect": 0.0,
    "false": 0.0,
    "no": 0.0,
    "n": 0.0,
    "noanswer": 0.0,
}


@dataclass(frozen=True)
class Answered:
    """One answered problem of a log. ``group`` names the problem, ``correct`` is a verdict in
    [0, 1], and ``confidence`` None if only the text may state one. ``probability`` is what
    the model gives its answer, where the log knows it. ``labels`` are columns of the log that
    may name a kind of problem.
    """

    group: str
    correct: float
    text: str
    confidence: float | None = None
    problem: str = ""
    answer: str = ""
    task: str = ""
    kind: str | None = None
    probability: float | None = None
    finished: bool = True
    labels: Mapping[str, str] | None = None


def verdict(value: object, where: str) -> float:
    """Return a verdict in [0, 1]: a number, a truth value, or Inspect's letters. Raises
    :class:`UserError`, which names ``where``, for anything else.
    """
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _VERDICTS:
            return _VERDICTS[word]
    return share(value, where)


def without_end_token(text: str) -> str:
    """Return a response without the end tokens of its turn, if a log has kept them."""
    while (token := end_token_of(text)) is not None:
        text = text.rstrip().removesuffix(token).rstrip()
    return text


def share(value: object, where: str) -> float:
    """Return a number from 0 to 1. Raises :class:`UserError` for anything else."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= 1:
        raise UserError(f"{where}: {value!r:.60} is not a number from 0 to 1")
    return number


def content_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message, whose content may be a list of parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def last_content(value: object) -> str:
    """Return a prompt, or the last message of a list of them."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and isinstance(value[-1], Mapping):
        return content_of(value[-1])
    return ""
