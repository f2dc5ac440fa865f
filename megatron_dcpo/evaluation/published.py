"""Evaluations compared with published numbers, from ``published.csv`` or a file with its columns.

The shipped file holds the numbers of the DCPO paper that this project knows at second hand, not the
paper's whole tables. ``recomputed`` is the value that follows from the paper's other columns, if it
differs from the printed one; ``mark`` names the discrepancy. Apart from the marked cells, PCE
exceeds ECE in 23 of the 50 cells per benchmark, which shared bins exclude. ``over`` are the
benchmarks that an overall value is the mean over, as far as they are known.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_dcpo.errors import UserError

OVERALL = "overall"  # the benchmark of a value over several


@dataclass(frozen=True)
class Published:
    """One printed number; shares are in [0, 1]. ``confidence`` is the kind of confidence, or "" if
    it is not known. ``over`` are the names of the benchmarks of an overall value, with spaces
    between, or "" if they are not known.
    """

    method: str
    benchmark: str
    confidence: str
    metric: str
    printed: float
    recomputed: float | None
    mark: str
    source: str
    over: str = ""

    @property
    def benchmarks(self) -> list[str]:
        """Return the benchmarks that the value is of; none if they are not known."""
        return self.over.split() if self.benchmark == OVERALL else [self.benchmark]


def load_published(name: str) -> list[Published]:
    """Load ``paper``, or a CSV file with the same columns; it may lack ``over``."""
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
                    over=row.get("over") or "",
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(
                f"{path}:{number}: {type(error).__name__} {error}; columns: {', '.join(columns)}"
            ) from None
    return published


def our_value(evaluation: Mapping[str, Any] | None, row: Published) -> float | None:
    """Return the value of an evaluation that corresponds to a published one, None if it has none.
    An overall value is the mean over the benchmarks that the published one is over, None if one of
    them was not evaluated or is undefined.
    """
    if evaluation is None:
        return None
    values = []
    for benchmark in row.benchmarks:
        value = _value_of(evaluation["benchmarks"].get(benchmark, {}), row)
        if value is None:
            return None
        values.append(value)
    return fmean(values) if values else None


def _value_of(scores: Mapping[str, Any], row: Published) -> float | None:
    """Return the metric of a row in the scores of one benchmark: of its confidence, or else of the
    answers. None if there is none.
    """
    for block in (scores.get(row.confidence, {}), scores):
        value = block.get(row.metric)
        if isinstance(value, int | float):
            return float(value)
    return None


def left_out(
    evaluations: Mapping[str, Mapping[str, Any] | None], rows: Sequence[Published]
) -> list[str]:
    """Return a line for every evaluation that no overall value stands for, since it lacks
    benchmarks of the published one, and one on overall values whose benchmarks are not known.
    """
    overall = [row for row in rows if row.benchmark == OVERALL]
    lines = []
    for over in dict.fromkeys(row.over for row in overall if row.over):
        for name, evaluation in evaluations.items():
            evaluated = (evaluation or {}).get("benchmarks", {})
            missing = [benchmark for benchmark in over.split() if benchmark not in evaluated]
            if evaluation is not None and missing:
                lines.append(
                    f"{name}: no overall value beside those published over "
                    f"{', '.join(over.split())}; not evaluated: {', '.join(missing)}"
                )
    unknown = sum(not row.over for row in overall)
    if unknown:
        lines.append(
            f"no value of ours beside {unknown} overall values whose benchmarks are not known; a "
            "file's column over names them"
        )
    return lines


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
