"""The second world: the lab's recipe on graphs (``examples/lab/graphs``), whose difficulty the prompt does not show.

``python -m lab world2 --train`` makes the cells; without it, tables from the published responses, ``world2_records.tar.xz``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.publish import write_json
from lab.results import interval
from lab.runner import EXAMPLES, Scale
from lab.testgrid import Draw, HeldOutLab, cells
from lab.testtables import (
    BANDS,
    ECE_COLUMNS,
    METRICS,
    TITLES,
    Records,
    Run,
    by_problem,
    ece_interval,
    load,
    lookup,
    scores,
    with_fitted,
)

RECORDS = "world2_records.tar.xz"
GRAPHS = EXAMPLES / "graphs"
METHODS = ("adapter_tokens", "dcpo_proper", "dcpo", "base")
DRAWS = MappingProxyType({"choosing": Draw(("heldout",), 8), "test": Draw(("test",), 8)})
SHOWN = tuple(name for name in METRICS if name != "ece_ood")
ROWS = MappingProxyType(
    {name: TITLES[name] for name in ("base", "grpo", "dcpo", "dcpo_proper", "adapter_tokens", "lookup")}
    | {"stated": "lookup, one number per answer given", "logprob": TITLES["logprob"]}
    | {name: TITLES[name] for name in ("consistency", "adapter_tokens_isotonic")}
    | {"adapter_tokens": "adapter, tokens of its own", "lookup": "lookup, one number per number of targets"}
)


def world(out: Path, jobs: int) -> HeldOutLab:
    scale = Scale(steps=300)
    return HeldOutLab(out, scale, jobs, recipe=GRAPHS / "recipe.yaml", data=GRAPHS, max_tokens=40, draws=DRAWS)


def train(out: Path, policies: Sequence[str], seeds: int, jobs: int) -> None:
    """Train and sample ``METHODS`` on every pretraining, "graphs.1"; finished cells are kept."""
    world(out.resolve(), jobs).run(cells(policies, METHODS, range(1, seeds + 1)))


def by_answer(fit: Records) -> Callable[[Records], np.ndarray]:
    """The accuracy of the responses with the same answer, of all responses where the answer is new."""
    table = lookup(replace(fit, kind=fit.answer))
    return lambda r: table(replace(r, kind=r.answer))


def rows(archive: Path) -> list[dict[str, Run]]:
    """One ``{row: responses}`` per run: seed by seed, in it every pretraining."""
    found = []
    for _, runs in sorted(load(archive, GRAPHS).items(), key=lambda item: (item[0][2], item[0][1])):
        grpo, filled = runs["grpo"], with_fitted(runs)
        stated = by_answer(grpo["heldout"])
        found.append(filled | {"stated": {part: r.stating(stated(r)) for part, r in grpo.items()}})
    return found


def tables(archive: Path, out: Path) -> dict[str, Any]:
    """Write ``world2.json`` and ``world2_tables.md``; returns the former: {row: {metric: [per run]}}."""
    of = rows(archive)
    result = {}
    for name in ROWS:
        values = [scores(r[name]) for r in of if name in r]
        result[name] = {key: [v[key] for v in values] for key in SHOWN}
    write_json(out / "world2.json", result)
    (out / "world2_tables.md").write_text(_markdown(of))
    return result


def _markdown(of: Sequence[Mapping[str, Run]]) -> str:
    lines = ["# Tables of the second world", "", "Reachability in a graph, test problems. A run is a seed of RL."]
    lines += ["Made by `python -m lab world2` from `world2_records.tar.xz` alone.", ""]
    lines += [f"| | run | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 2) + "|"]
    cells = [(name, run, r) for name in ROWS for run, r in enumerate(of, start=1) if name in r]
    for name, run, r in cells:
        found = scores(r[name])
        lines.append(f"| {ROWS[name]} | {run} | {' | '.join(f'{found[key]:.4f}' for key in SHOWN)} |")
    lines += [
        "",
        "ECE: plug-in, corrected for its bias, 95 % interval over problems; what",
        BANDS,
        "",
        "| | run | " + ECE_COLUMNS,
    ]
    lines += [f"| {ROWS[name]} | {run} | {ece_interval(r[name]['test'])} |" for name, run, r in cells]
    for start in ("grpo", "logprob"):
        lines += ["", f"Minus {ROWS[start]}, same problems and run; ± for other problems:", ""]
        lines += ["| | run | accuracy, points | Brier |", "|---" * 4 + "|"]
        lines += [f"| {ROWS[name]} | {run} | {_gap(r[name], r[start])} |" for name, run, r in cells if name != start]
    return "\n".join([*lines, "", *_by_targets(of)]) + "\n"


def _gap(run: Run, start: Run) -> str:
    """Cells of a table: accuracy in points and Brier score minus ``start``'s, intervals over problems."""
    shown = []
    for value in (lambda r: 100 * r.correct, lambda r: (r.confidence - r.correct) ** 2):
        found = interval(by_problem(run["test"], value) - by_problem(start["test"], value))
        shown.append(f"{found.mean:+.4f} ± {found.high - found.mean:.4f}")
    return " | ".join(shown)


def _by_targets(of: Sequence[Mapping[str, Run]]) -> list[str]:
    """Accuracy and mean confidence of the first run by what the prompt shows: nodes with an edge towards them."""
    lines = ["Accuracy / mean confidence by the number of nodes with an edge towards them (run 1):", ""]
    kinds = sorted(set(of[0]["grpo"]["test"].kind), key=int)
    lines += [f"| | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in ("base", "grpo", "dcpo", "dcpo_proper", "adapter_tokens"):
        if name in of[0]:
            r = of[0][name]["test"]
            shown = [
                f"{r.correct[r.kind == k].mean():.2f} / {np.nanmean(r.confidence[r.kind == k]):.2f}" for k in kinds
            ]
            lines.append(f"| {ROWS[name]} | {' | '.join(shown)} |")
    return lines
