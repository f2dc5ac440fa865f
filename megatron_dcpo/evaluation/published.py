"""Evaluations compared with published numbers, from ``published.csv`` or a file with its columns.

The shipped file holds the numbers of the DCPO paper that this project knows at second hand, not the
paper's whole tables. ``recomputed`` is the value that follows from the paper's other columns, if it
differs from the printed one; ``mark`` names the discrepancy. Apart from the marked cells, PCE
exceeds ECE in 23 of the 50 cells per benchmark, which shared bins exclude.
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
    """One printed number; shares are in [0, 1]. ``confidence`` is the kind of confidence, or "" if
    it is not known.
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
    path: Traversable = Path(name)
    if name == "paper":
        path = files("megatron_dcpo.evaluation") / "published.csv"
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
            published.append(
                Published(
                    method=row["method"],
                    benchmark=row["benchmark"],
                    confidence=row["confidence"],
                    metric=row["metric"],
                    printed=float(row["printed"]),
                    recomputed=recomputed,
                    mark=row["mark"],
                    source=row["source"],
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: {type(error).__name__} {error}; columns: {', '.join(columns)}"
            ) from None
    return published


def our_value(evaluation: Mapping[str, Any] | None, row: Published) -> float | None:
    """Return the value of an evaluation that corresponds to a published one, None if it has none.
    Overall values are means over the benchmarks, as in the paper, if those are defined.
    """
    if evaluation is None:
        return None
    if row.benchmark == "overall":
        scores = evaluation["overall"]
    else:
        scores = evaluation["benchmarks"].get(row.benchmark)
    if scores is None:
        return None
    macro = scores.get("macro", {})
    for block in (macro.get(row.confidence, {}), macro, scores.get(row.confidence, {}), scores):
        value = block.get(row.metric)
        if isinstance(value, int | float):
            return float(value)
    return None


def compare(
    evaluations: Mapping[str, Mapping[str, Any] | None], rows: Sequence[Published]
) -> list[dict[str, Any]]:
    """Return every published row with the values of all runs (``ours``), for JSON and the page."""
    compared = []
    for row in rows:
        ours = {}
        for name, evaluation in evaluations.items():
            ours[name] = our_value(evaluation, row)
        compared.append({**vars(row), "ours": ours})
    return compared
