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
from lab.results import crossed, interval
from lab.runner import EXAMPLES, Scale
from lab.testgrid import Draw, HeldOutLab, cells
from lab.testtables import METRICS, TITLES, Records, Run, by_problem, ece_interval, load, lookup, scores, with_fitted

RECORDS = "world2_records.tar.xz"
GRAPHS = EXAMPLES / "graphs"
METHODS = ("adapter_tokens", "dcpo_proper", "dcpo", "base")
DRAWS = MappingProxyType({"choosing": Draw(("heldout",), 8), "test": Draw(("test",), 8)})
SHOWN = tuple(name for name in METRICS if name != "ece_ood")
ROWS = MappingProxyType(
    {name: TITLES[name] for name in ("base", "grpo", "dcpo", "dcpo_proper", "adapter", "lookup")}
    | {"stated": "lookup, one number per answer given", "logprob": TITLES["logprob"]}
    | {name: TITLES[name] for name in ("consistency", "adapter_isotonic")}
    | {"adapter": "adapter, tokens of its own", "lookup": "lookup, one number per number of targets"}
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


def rows(archive: Path, seed: int = 1) -> list[dict[str, Run]]:
    """One ``{row: responses}`` per pretraining."""
    found = []
    for _, runs in sorted(load(archive, seed, GRAPHS).items()):
        grpo, filled = runs["grpo"], with_fitted(runs)
        stated = by_answer(grpo["heldout"])
        found.append(filled | {"stated": {part: r.stating(stated(r)) for part, r in grpo.items()}})
    return found


def tables(archive: Path, out: Path) -> dict[str, Any]:
    """Write ``world2.json`` and ``world2_tables.md``; returns the former: {row: {metric: [per pretraining]}}."""
    of = rows(archive)
    result: dict[str, Any] = {}
    for name in ROWS:
        values = [scores(r[name]) for r in of if name in r]
        if values:
            result[name] = {key: [v[key] for v in values] for key in SHOWN}
    write_json(out / "world2.json", result)
    (out / "world2_tables.md").write_text(_markdown(of, result))
    return result


def _markdown(of: Sequence[Mapping[str, Run]], result: Mapping[str, Any]) -> str:
    lines = [
        "# Tables of the second world",
        "",
        "Reachability in a graph, test problems, mean over the n pretrainings.",
    ]
    lines += ["Made by `python -m lab world2` from `world2_records.tar.xz` alone.", ""]
    lines += [f"| | n | {' | '.join(SHOWN)} |", "|---" * (len(SHOWN) + 2) + "|"]
    for name, row in result.items():
        shown = " | ".join(f"{np.mean(row[key]):.4f}" for key in SHOWN)
        lines.append(f"| {ROWS[name]} | {len(row['accuracy'])} | {shown} |")
    lines += ["", "ECE: plug-in, corrected for its bias, 95 % interval over problems; what 95 % of calibrated"]
    lines += ["models with these confidences stay below.", ""]
    lines += ["| | pretraining | ECE | corrected | interval | calibrated |", "|---" * 6 + "|"]
    for name in result:
        for number, r in enumerate((r[name] for r in of if name in r), start=1):
            lines.append(f"| {ROWS[name]} | {number} | {ece_interval(r['test'])} |")
    lines += ["", *_gaps(of, "grpo"), "", *_gaps(of, "logprob"), "", *_by_targets(of)]
    return "\n".join(lines) + "\n"


def _gaps(of: Sequence[Mapping[str, Run]], start: str) -> list[str]:
    """Accuracy in points and Brier score minus ``start``'s; intervals for other problems, with several pretrainings for
    other ones of them as well."""
    lines = [
        f"Minus {ROWS[start]}, same problems;",
        "± for other problems, where n > 1 also for other pretrainings:",
        "",
    ]
    lines += ["| | accuracy, points | Brier |", "|---|---|---|"]
    for name in ROWS:
        both = [r for r in of if name in r and start in r and name != start]
        shown = []
        for value in (lambda r: 100 * r.correct, lambda r: (r.confidence - r.correct) ** 2):
            gaps = np.array([by_problem(r[name]["test"], value) - by_problem(r[start]["test"], value) for r in both])
            if both:
                found = crossed(gaps) if len(both) > 1 else interval(gaps[0])
                shown.append(f"{found.mean:+.4f} ± {found.high - found.mean:.4f}")
        lines += [f"| {ROWS[name]} | {' | '.join(shown)} |"] if both else []
    return lines


def _by_targets(of: Sequence[Mapping[str, Run]]) -> list[str]:
    """Accuracy and mean confidence of the first pretraining by what the prompt shows: nodes with an edge towards them."""
    lines = ["Accuracy / mean confidence by the number of nodes with an edge towards them (pretraining 1):", ""]
    kinds = sorted(set(of[0]["grpo"]["test"].kind), key=int)
    lines += [f"| | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in ("base", "grpo", "dcpo", "dcpo_proper", "adapter"):
        if name in of[0]:
            r = of[0][name]["test"]
            shown = [
                f"{r.correct[r.kind == k].mean():.2f} / {np.nanmean(r.confidence[r.kind == k]):.2f}" for k in kinds
            ]
            lines.append(f"| {ROWS[name]} | {' | '.join(shown)} |")
    return lines
