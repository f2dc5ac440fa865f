"""Our numbers beside published ones: ``published.csv`` (or a file of the same columns) against
evaluations.

The shipped file holds the numbers of the DCPO paper that are known to this project at second hand,
not its whole tables. ``recomputed`` is what the paper's own columns give where that differs from
what it prints; ``mark`` says what does not fit. Besides the cells marked, PCE exceeds ECE in 23 of
the 50 cells per benchmark, which shared bins exclude.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError


@dataclass(frozen=True)
class Published:
    """One printed number. ``confidence``: the kind, or "" where it is not known; shares are in [0,
    1].
    """

    method: str
    benchmark: str
    confidence: str
    metric: str
    printed: float
    recomputed: float | None
    mark: str
    source: str


def load_published(name: str) -> list[Published]:
    """Load ``paper``, or a CSV file with the same columns."""
    path: Traversable = (
        files("megatron_dcpo.evaluation") / "published.csv"
        if name == "paper"
        else Path(name)
    )
    columns = [field.name for field in fields(Published)]
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(
            f"{path}: {why}; give --against a CSV with the columns {', '.join(columns)}"
        ) from None
    published = []
    for number, row in enumerate(rows, start=2):
        try:
            recomputed = float(row["recomputed"]) if row["recomputed"] else None
            rest = {
                name: row[name]
                for name in columns
                if name not in ("printed", "recomputed")
            }
            published.append(
                Published(printed=float(row["printed"]), recomputed=recomputed, **rest)
            )
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: {type(error).__name__} {error}; columns: {', '.join(columns)}"
            ) from None
    return published


def our_value(evaluation: Mapping[str, Any] | None, row: Published) -> float | None:
    """Return the same number of an evaluation; overall is the mean of its benchmarks, as the paper
    has it, where defined.
    """
    if evaluation is None:
        return None
    scores = (
        evaluation["overall"]
        if row.benchmark == "overall"
        else evaluation["benchmarks"].get(row.benchmark)
    )
    if scores is None:
        return None
    macro = scores.get("macro", {})
    for place in (
        macro.get(row.confidence, {}),
        macro,
        scores.get(row.confidence, {}),
        scores,
    ):
        value = place.get(row.metric)
        if isinstance(value, int | float):
            return float(value)
    return None


def compare(
    evaluations: Mapping[str, Mapping[str, Any] | None], rows: Sequence[Published]
) -> list[dict[str, Any]]:
    """Return every published row with the value of every run, for JSON and for the page."""
    return [
        {
            **vars(row),
            "ours": {
                name: our_value(evaluation, row)
                for name, evaluation in evaluations.items()
            },
        }
        for row in rows
    ]
