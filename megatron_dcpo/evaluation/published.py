"""Our numbers beside published ones: ``docs/paper_tables.csv`` (or a file of the same columns) against evaluations.

The shipped file holds the numbers of the DCPO paper that are known to this project at second hand, not its whole
tables. ``recomputed`` is what the paper's own columns give where that differs from what it prints; ``mark`` says what
does not fit. Besides the cells marked, PCE exceeds ECE in 23 of the 50 cells per benchmark, which shared bins exclude.
"""

from __future__ import annotations

import csv
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError

_SHIPPED = Path(__file__).resolve().parents[2] / "docs" / "paper_tables.csv"


@dataclass(frozen=True)
class Published:
    """One printed number. ``confidence``: the kind, or "" where it is not known; shares are in [0, 1]."""

    method: str
    benchmark: str
    confidence: str
    metric: str
    printed: float
    recomputed: float | None
    mark: str
    source: str


def load_published(name: str) -> list[Published]:
    """``paper``, or the path of a CSV file with the same columns."""
    path = _SHIPPED if name == "paper" else Path(name)
    columns = [field.name for field in fields(Published)]
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; give --against a CSV with the columns {', '.join(columns)}"
        ) from None
    found = []
    for number, row in enumerate(rows, start=2):
        try:
            recomputed = float(row["recomputed"]) if row["recomputed"] else None
            rest = {name: row[name] for name in columns if name not in ("printed", "recomputed")}
            found.append(Published(printed=float(row["printed"]), recomputed=recomputed, **rest))
        except (KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}:{number}: {type(error).__name__} {error}; columns: {', '.join(columns)}") from None
    return found


def our_value(evaluation: Mapping[str, Any] | None, row: Published) -> float | None:
    """The same number of an evaluation; overall is the mean of its benchmarks, as the paper has it, where defined."""
    if evaluation is None:
        return None
    scores = evaluation["overall"] if row.benchmark == "overall" else evaluation["benchmarks"].get(row.benchmark)
    if scores is None:
        return None
    macro = scores.get("macro", {})
    for place in (macro.get(row.confidence, {}), macro, scores.get(row.confidence, {}), scores):
        value = place.get(row.metric)
        if isinstance(value, int | float):
            return float(value)
    return None


def compare(evaluations: Mapping[str, Mapping[str, Any] | None], rows: Sequence[Published]) -> list[dict[str, Any]]:
    """Every published row with the value of every run, for JSON and for the page."""
    return [
        {**vars(row), "ours": {name: our_value(evaluation, row) for name, evaluation in evaluations.items()}}
        for row in rows
    ]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """A section of the report page."""
    if not rows:
        return ""
    runs = list(rows[0]["ours"])
    head = "".join(
        f"<th>{html.escape(name)}</th>"
        for name in ("Benchmark", "Metric", "Printed", *runs, "Recomputed", "Mark", "Source")
    )
    lines = []
    for row in rows:
        metric = f"{row['metric']} ({row['confidence']})" if row["confidence"] else row["metric"]
        numbers = [row["printed"], *row["ours"].values(), row["recomputed"]]
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in (row["benchmark"], metric, *map(_number, numbers)))
        notes = f"<td class=note>{html.escape(row['mark'])}</td><td>{html.escape(row['source'])}</td>"
        lines.append(f"<tr><th>{breakable(row['method'])}</th>{cells}{notes}</tr>")
    hint = (
        "Numbers as published beside ours of the same benchmark and kind of confidence. Recomputed: the mean of the "
        "published columns where it is not what is printed. Source: the part of the paper; all numbers are known to this "
        "project at second hand. Besides the marks: PCE exceeds ECE in 23 of the paper's 50 cells per benchmark, which the "
        "definitions exclude. Other model, sampling or data: no number here is a target."
    )
    return (
        f'<section><h2>Against the paper</h2><p class="hint">{hint}</p><div class="scroll"><table><thead><tr>'
        f"<th>Method</th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


def breakable(name: str) -> str:
    """A name as HTML that a narrow column may break behind underscores, slashes and hyphens."""
    return re.sub(r"([_/-])", r"\1<wbr>", html.escape(name))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
