"""What a problem is known by: its kind, the labels of its row, and its id in an epoch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KIND_COLUMNS = ("kind", "type", "level", "difficulty", "subject", "task")
LONGEST_LABEL = 100  # characters
_NO_LABELS = frozenset(
    {"problem", "question", "prompt", "answer", "ground_truth", "final_answer", "outcome"}
)
_EPOCH = re.compile(r"@\d+\Z")  # what with_epoch appends

Row = Mapping[str, Any]


def kind_of_row(row: Row) -> str | None:
    """Return what the first of ``KIND_COLUMNS`` says; None where there is none, or it is no text or
    whole number.
    """
    return as_kind(next((row[name] for name in KIND_COLUMNS if name in row), None))


def as_kind(value: object) -> str | None:
    """Return a value as the name of a kind; None if it is no text or whole number."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)[:LONGEST_LABEL]


def labels_of(row: Row) -> dict[str, str] | None:
    """Return the columns of a row that may name a kind of problem: texts of one line and at most
    ``LONGEST_LABEL`` characters, and whole numbers; not the problem and its answer. None if it has
    no such column.
    """
    labels = {}
    for name, value in row.items():
        if name in _NO_LABELS or isinstance(value, bool) or not isinstance(value, str | int):
            continue
        text = str(value)
        if len(text) <= LONGEST_LABEL and "\n" not in text:
            labels[str(name)] = text
    return labels or None


def with_epoch(prompt_id: str, epoch: int) -> str:
    """Return the id of a problem as a training draws it in an epoch."""
    return f"{prompt_id}@{epoch}"


def without_epoch(drawn_id: str) -> str:
    """Return the id of a problem from the one that :func:`with_epoch` made of it; any other id as
    it is.
    """
    return _EPOCH.sub("", drawn_id)
