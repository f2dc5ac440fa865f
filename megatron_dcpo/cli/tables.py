"""Tables of scores on a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_dcpo.runtime.text import printable

if TYPE_CHECKING:
    from rich.table import Table


def print_table(numbers: Mapping[str, Mapping[str, Any]], first: str = "run") -> None:
    """Print one line per name, with the headline metrics as columns."""
    from rich.table import Table
    from rich.text import Text

    from megatron_dcpo.evaluation.headline import METRICS, format_value

    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for metric in METRICS.values():
        table.add_column(metric.label, justify="right", no_wrap=True)
    for name, values in numbers.items():
        cells = [format_value(key, values.get(key)) for key in METRICS]
        table.add_row(Text(printable(name)), *cells)
    print_whole(table)


def print_whole(table: Table) -> None:
    """Print a table; a narrow window breaks its lines, rather than losing digits."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 140)
    console.print(table, markup=False)


def show_scores(
    what: str,
    out: str,
    rows: Mapping[str, Mapping[str, Any]],
    kinds: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Print where a fitted confidence is, and its scores on the held-out problems by name, if there
    are any, with what the ``kinds`` of problem are (:func:`kinds.described`).
    """
    from megatron_dcpo.calibration.summary import json_ready
    from megatron_dcpo.data.problem_kinds import no_kinds_line

    if as_json and rows:
        values = {what: out, "kinds": kinds, "held_out": rows}
        print(json.dumps(json_ready(values), indent=1))
    elif as_json:
        print(json.dumps({what: out}))
    elif rows:
        print_table(rows, "held out")
        if not kinds["by"]:
            print(printable(no_kinds_line(kinds["possible"])))
        print(f"wrote {out}")
    else:
        print(f"no problem was held out; wrote {out}")
