"""The second world: the lab's test on graphs (``examples/lab/graphs``), whose difficulty the prompt
does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.fitted import Run, with_fitted
from lab.results import interval, write_json
from lab.testgrid import EXAMPLES, Draw, Lab
from lab.testtables import (
    METRICS,
    TITLES,
    VALUES,
    bands,
    difference,
    load,
    recalibrated,
    scores,
    shown,
    table,
)

RECORDS = "world2_records.tar.xz"
GRAPHS = EXAMPLES / "graphs"
METHODS = ("grpo", "dcpo_proper", "dcpo", "base")
DRAWS = MappingProxyType({"choosing": Draw("heldout", 8), "test": Draw("test", 8)})
SHOWN = tuple(name for name in METRICS if not name.endswith("2x2"))
ROWS = MappingProxyType(
    {
        name: TITLES[name]
        for name in ("base", "grpo", "dcpo", "dcpo_proper", "dcpo_proper_digits", "adapter_tokens")
    }
    | {"lookup": "lookup, one number per number of targets"}
    | {
        name: TITLES[name]
        for name in ("logprob", "logprob_type", "logistic", "adapter_tokens_isotonic")
    }
)


def world(out: Path, jobs: int) -> Lab:
    """Return the second world's cells below ``out``."""
    recipe = GRAPHS / "recipe.yaml"
    return Lab(
        out.resolve(), jobs, steps=300, recipe=recipe, data=GRAPHS, max_tokens=40, draws=DRAWS
    )


def rows(archive: Path) -> list[dict[str, Run]]:
    """Return one ``{row: responses}`` per run: seed by seed, in it every pretraining."""
    found = sorted(load(archive, GRAPHS).items(), key=lambda item: (item[0][2], item[0][1]))
    return [with_fitted(runs) for _, runs in found]


def tables(archive: Path, out: Path) -> dict[str, Any]:
    """Write ``world2.json`` and ``world2_tables.md``; return the former: {row: {metric: [per
    run]}}.
    """
    of = rows(archive)
    result = {name: [scores(r[name]) for r in of if name in r] for name in ROWS}
    result = {
        name: {key: [v[key] for v in values] for key in SHOWN}
        for name, values in result.items()
        if values
    }
    write_json(out / "world2.json", result)
    (out / "world2_tables.md").write_text(_markdown(of))
    return result


def _markdown(of: Sequence[Mapping[str, Run]]) -> str:
    cells = [(name, run, r) for name in ROWS for run, r in enumerate(of, start=1) if name in r]
    main = []
    for name, run, r in cells:
        numbers = [*(scores(r[name])[key] for key in SHOWN), *bands([r[name]["test"]])]
        main.append((ROWS[name], str(run), *(f"{number:.4f}" for number in numbers)))
    text = (
        "Reachability in a graph, test problems. A run is a seed of RL. Made by "
        "`python -m lab world2` from "
    )
    text += (
        "`world2_records.tar.xz` alone. The last two columns: what 95 % of calibrated "
        "models stay below, where "
    )
    text += "labels are independent, and where they are as alike within a problem as here."
    lines = ["# Tables of the second world", ""]
    lines += table(text, ("run", *SHOWN, "ECE, independent", "within problems"), main)
    gaps = [
        (
            ROWS[name],
            str(run),
            *(shown(v, interval(difference(r[name], r["logprob"], v))) for v in VALUES),
        )
        for name, run, r in cells
        if name != "logprob"
    ]
    text = f"Minus {ROWS['logprob']} (GRPO's own), same problems and run; ± for other problems:"
    lines += table(text, ("run", *VALUES), gaps)
    trained = [name for name in METHODS if name in of[0]] + ["dcpo_proper_digits"]
    return "\n".join([*lines, *recalibrated({1: of}, [name for name in ROWS if name in trained])])
