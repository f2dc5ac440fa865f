"""From published cells to ``summary.json``, ``tables.md`` and the figures: no training, seconds."""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path
from typing import Any

from lab.figures import FIGURES
from lab.grid import FAMILIES, METHODS, TRANSFER
from lab.results import COLUMNS, collect, load_cells, rounded, values_by_row
from lab.runner import EXAMPLES
from lab.tables import (
    ABLATION_ROWS,
    MAIN_ROWS,
    bars,
    bars_table,
    claims,
    claims_table,
    difference_table,
    markdown_table,
    sweep_table,
    type_table,
    violation_table,
)
from megatron_dcpo.calibration import json_ready

logger = logging.getLogger(__name__)

ARCHIVE = "cells.tar.xz"

FAMILY_TITLES = {
    "qwen3": "Qwen3, 2 layers, 125 k parameters",
    "llama": "Llama-3.1, 2 layers, 125 k parameters",
    "large": "Qwen3, 3 layers, 178 k parameters",
}


def render(out: Path, grid: Path | None = None) -> list[dict[str, Any]]:
    """Collect ``grid`` (the ``cells`` directory of a run) if given, then write everything; returns the bars."""
    if grid is not None:
        logger.info("%d cells collected", collect(grid, out / ARCHIVE, EXAMPLES / "data" / "heldout.jsonl"))
    cells = load_cells(out / ARCHIVE)
    rows = {family: values_by_row(cells, family) for family in FAMILIES}
    found = bars(rows["qwen3"])
    write_json(out / "summary.json", rows["qwen3"])
    write_json(out / "summary_families.json", {family: rows[family] for family in FAMILIES if rows[family]})
    write_json(out / "bars.json", found)
    (out / "tables.md").write_text(tables(cells, rows, found))
    for name, draw in FIGURES.items():
        draw(cells, out / name)
    return found


def tables(cells: list[dict[str, Any]], rows: dict[str, Any], found: list[dict[str, Any]]) -> str:
    main = rows["qwen3"]
    commits = sorted({c["commit"] for c in cells})
    parts = [
        "# Tables of the calibration lab",
        "Held-out problems. Mean over n seeds ± half the 95 % interval (Student's t). Made by "
        f"`python -m lab render`; {len(cells)} cells, of commit {', '.join(commits)}.",
        "## Main table (the paper's table 1)",
        "Verbal confidence unless the row names another kind: CCGSPG is made for the token's, ConfClass for its "
        "classifier's.",
        markdown_table(main, MAIN_ROWS),
        "## Ablations (the paper's table 3)",
        "DCPO without group labels, without instance labels, without decoupling, without on-policy training; then, step by "
        "step, towards the improved preset: a proper score, not divided by the group's std (a weight of 8 in its place); "
        "the response's own label; the counterfactual baseline; then the preset, which has one scale for the whole batch "
        "instead of the 8, all digits of the confidence at once and the marker with the reasoning, without one of its "
        "parts.",
        markdown_table(main, ABLATION_ROWS),
        "## Lambda sweep of the paper's DCPO",
        sweep_table(main),
        "## Accuracy against GRPO and DCPO, in points",
        "The same problems and seeds under both. The first interval is for other seeds of training on these problems, the "
        "second for other problems of the kind as well.",
        "**minus GRPO**",
        difference_table(cells, "grpo", [name for name, method in METHODS.items() if method.kind == "train"]),
        "**minus DCPO**",
        difference_table(cells, "dcpo", ("dcpo_i", "dcpo_g", "coupled", "rlcr", "dcpo_proper", "proper_sampled")),
        "## Format violations in training, by steps",
        violation_table(cells),
        "## Response length (tokens, held out)",
        markdown_table(
            main, [name for name in METHODS if name in main], ("accuracy", "mean_length", "mean_confidence")
        ),
        "## By type of problem",
        "What a confidence knows beyond the type of the problem shows in the AUROC within one type.",
        type_table(cells, ("base", "grpo", "rlcr", "dcpo", "dcpo_proper")),
    ]
    for family in FAMILIES[1:]:
        if rows[family]:
            verbal = [name for name in rows[family] if not name.endswith("_token")]
            parts += [f"## Another policy: {FAMILY_TITLES[family]}", markdown_table(rows[family], verbal)]
            parts += ["**Accuracy minus GRPO's**", difference_table(cells, "grpo", TRANSFER, family)]
            parts += ["**Accuracy minus DCPO's**", difference_table(cells, "dcpo", ("dcpo_proper",), family)]
    parts += ["## The paper's order, here", claims_table(claims(main))]
    parts += ["## What the lab is held to", bars_table(found), "## Every seed", every_seed(main)]
    return "\n\n".join(wrapped(part) for part in parts) + "\n"


def wrapped(part: str) -> str:
    """Prose in lines of at most 100 columns; tables and headings as they are."""
    return part.rstrip() if part.startswith(("|", "#")) else textwrap.fill(part, 100, break_on_hyphens=False)


def every_seed(rows: dict[str, Any]) -> str:
    lines = [f"| method | seed | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, row in rows.items():
        for i, seed in enumerate(row["seed"]):
            lines.append(f"| {name} | {seed} | {' | '.join(f'{row[column][i]:.4f}' for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(rounded(json_ready(value)), indent=1) + "\n")
