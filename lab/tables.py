"""The tables of the lab, as Markdown and as ``summary.json``, and its acceptance criteria, computed and not asserted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lab.grid import METHODS
from lab.results import COLUMNS, Interval, apart, crossed, curves, interval, row_title, values_by_row

HEADINGS = {
    "accuracy": "accuracy",
    "ece": "ECE",
    "pce": "PCE",
    "brier": "Brier",
    "auroc": "AUROC",
    "violation_rate": "violations",
    "mean_confidence": "confidence",
    "mean_length": "length",
}
MAIN_ROWS = (
    "base_token", "base", "grpo_token", "grpo", "confclass", "rlcr", "ccgspg_verbal", "ccgspg", "dcpo", "dcpo_proper",
)  # fmt: skip
ABLATION_ROWS = (
    "dcpo", "dcpo_i", "dcpo_g", "coupled", "posthoc",
    "brier_lam05", "brier_lam0", "brier_counterfactual", "proper_sampled", "proper_marker", "proper_plain", "dcpo_proper",
)  # fmt: skip
SWEEP_ROWS = {0.0: "dcpo_i", 0.25: "dcpo_lam025", 0.5: "dcpo", 0.75: "dcpo_lam075", 1.0: "dcpo_g"}
Rows = Mapping[str, Mapping[str, Sequence[float]]]


def markdown_table(rows: Rows, names: Sequence[str], columns: Sequence[str] = COLUMNS) -> str:
    """One line per method: mean ± half the 95 % interval over seeds; what has not been run is left out."""
    lines = [f"| | n | {' | '.join(HEADINGS[c] for c in columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name in names:
        if name in rows:
            cells = [_shown(column, interval(rows[name][column])) for column in columns]
            lines.append(f"| {row_title(name)} | {len(rows[name]['accuracy'])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(column: str, value: Interval) -> str:
    return f"{_digits(column, value.mean)} {_half(column, value)}".rstrip()


def _half(column: str, value: Interval) -> str:
    """Half the interval, nothing where it is not known."""
    return "" if math.isnan(value.low) else f"± {_digits(column, value.high - value.mean)}"


def _digits(column: str, value: float) -> str:
    if math.isnan(value):
        return "–"
    if column == "points":
        return f"{100 * value:.2f}"
    if column == "violation_rate":
        return f"{100 * value:.2f} %"
    return f"{value:.1f}" if column == "mean_length" else f"{value:.3f}"


def sweep_table(rows: Rows) -> str:
    """The paper's lambda sweep."""
    lines = [
        "| lambda | n | accuracy | ECE | PCE | Brier | AUROC | violations |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for lam, name in SWEEP_ROWS.items():
        if name in rows:
            cells = [_shown(column, interval(rows[name][column])) for column in COLUMNS]
            lines.append(f"| {lam:g} | {len(rows[name]['accuracy'])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def violation_table(cells: Sequence[dict[str, Any]], every: int = 50) -> str:
    """Share of training responses without a valid confidence, per ``every`` steps, mean over seeds; and held out."""
    found = {m: curves(cells, m, "format/violation_rate") for m in METHODS}
    found = {m: c for m, c in found.items() if c.size}
    longest = max((c.shape[1] for c in found.values()), default=0)
    ends = range(every, longest + every, every)
    lines = [f"| | {' | '.join(f'{e - every + 1}–{min(e, longest)}' for e in ends)} | held out |"]
    lines.append("|---" * (len(ends) + 2) + "|")
    rows = values_by_row(cells, "qwen3")
    for method, curve in found.items():
        parts = [curve[:, e - every : e] for e in ends]
        shown = [f"{100 * part.mean():.2f} %" if part.size else "" for part in parts]
        held = f"{100 * float(np.mean(rows[method]['violation_rate'])):.3f} %"
        lines.append(f"| {METHODS[method].title} | {' | '.join(shown)} | {held} |")
    return "\n".join(lines) + "\n"


def difference_table(
    cells: Sequence[dict[str, Any]], against: str, methods: Sequence[str], family: str = "qwen3"
) -> str:
    """Accuracy of ``methods`` minus that of ``against`` in points, same seeds and problems, on the policy ``family``."""
    right = {(c["method"], c["seed"]): c for c in cells if c["family"] == family and "right" in c}
    lines = ["| | n | difference | 95 %, other seeds | 95 %, other seeds and problems |", "|---" * 5 + "|"]
    for method in methods:
        seeds = sorted(seed for name, seed in right if name == method and (against, seed) in right)
        if not seeds or method == against:
            continue
        ours, theirs = (np.array([_shares(right[name, seed]) for seed in seeds]) for name in (method, against))
        over_seeds, over_both = interval((ours - theirs).mean(axis=1)), crossed(ours - theirs)
        halves = [_half("points", value) or "–" for value in (over_seeds, over_both)]
        lines.append(f"| {METHODS[method].title} | {len(seeds)} | {100 * over_both.mean:+.2f} | {' | '.join(halves)} |")
    return "\n".join(lines) + "\n"


def _shares(cell: Mapping[str, Any]) -> np.ndarray:
    """Share of right responses to each problem."""
    right = np.array(cell["right"], dtype=np.float64)
    return right * len(right) / cell["n"]


def type_table(cells: Sequence[dict[str, Any]], methods: Sequence[str]) -> str:
    """Accuracy, confidence and AUROC within each type of problem, means over seeds of the main policy."""
    lines = ["| | type | n | accuracy | confidence | ECE | AUROC |", "|---" * 7 + "|"]
    for method in methods:
        mine = [c["by_type"] for c in cells if c["family"] == "qwen3" and c["method"] == method and "by_type" in c]
        for kind in dict.fromkeys(name for one in mine for name in one):
            rows = [one[kind] for one in mine]
            known = {
                key: [row[key] for row in rows if row[key] is not None]
                for key in ("accuracy", "mean_confidence", "ece", "auroc")
            }
            shown = " | ".join(_digits(key, interval(values).mean) for key, values in known.items())
            lines.append(f"| {METHODS[method].title} | {kind} | {len(rows)} | {shown} |")
    return "\n".join(lines) + "\n"


def bars(rows: Rows) -> list[dict[str, Any]]:
    """The acceptance criteria of the lab: each with its numbers and whether it holds. Empty before the grid is there."""
    if not {"base", "grpo", "dcpo", "dcpo_proper"} <= set(rows):
        return []

    def of(name: str, column: str) -> Interval:
        return interval(rows[name][column])

    result = []

    def bar(name: str, holds: bool, numbers: str) -> None:
        result.append({"bar": name, "holds": bool(holds), "numbers": numbers})

    base, rivals = of("base", "ece").mean, [r for r in ("grpo", "rlcr", "ccgspg", "confclass", "coupled") if r in rows]
    for name, share, least in (("dcpo", 0.25, 0.90), ("dcpo_proper", 0.12, 0.95)):
        title, ece, auroc = METHODS[name].title, of(name, "ece"), of(name, "auroc")
        gap = of(name, "accuracy").mean - of("grpo", "accuracy").mean
        bar(f"{title}: accuracy at most 1 point below GRPO", gap >= -0.01, f"{100 * gap:+.2f} points")
        bar(
            f"{title}: ECE at most {share} x base",
            ece.mean <= share * base,
            f"{ece} = {ece.mean / base:.3f} x {base:.3f}",
        )
        bar(f"{title}: AUROC at least {least}", auroc.mean >= least, str(auroc))
        below = [r for r in rivals if ece.mean < of(r, "ece").mean]
        clear = [r for r in below if apart(ece, of(r, "ece"))]
        bar(f"{title}: ECE below all of {', '.join(rivals)}", below == rivals, f"below {len(below)} of {len(rivals)}")
        bar(f"{title}: intervals apart from at least four of them", len(clear) >= 4, ", ".join(clear) or "none")
        rate = of(name, "violation_rate").mean
        bar(f"{title}: violations below 0.3 %", rate < 0.003, f"{100 * rate:.3f} %")
    for column, better in (("ece", -1), ("auroc", 1)):
        ours, paper = of("dcpo_proper", column), of("dcpo", column)
        won = apart(ours, paper) and better * (ours.mean - paper.mean) > 0
        bar(f"DCPO-proper against DCPO: {HEADINGS[column]} better, intervals apart", won, f"{ours} against {paper}")
    gap = of("dcpo_proper", "accuracy").mean - of("dcpo", "accuracy").mean
    numbers = f"{100 * gap:+.2f} points, {paired(rows, 'dcpo_proper', 'dcpo')}"
    bar("DCPO-proper against DCPO: accuracy not worse", gap >= 0, numbers)
    return result


def paired(rows: Rows, a: str, b: str, column: str = "accuracy") -> str:
    """The difference a - b by seed, with its interval."""
    first = dict(zip(rows[a]["seed"], rows[a][column], strict=True))
    second = dict(zip(rows[b]["seed"], rows[b][column], strict=True))
    return f"paired by seed {interval([first[s] - second[s] for s in first if s in second])}"


# What the paper's tables and text state about order: (claim, better row, worse row, column, the lower is better).
CLAIMS = (
    ("GRPO is more accurate than base", "grpo", "base", "accuracy", False),
    ("GRPO's token confidence is higher than base's", "grpo_token", "base_token", "mean_confidence", False),
    ("DCPO is as accurate as GRPO or more", "dcpo", "grpo", "accuracy", False),
    ("DCPO is more accurate than RLCR", "dcpo", "rlcr", "accuracy", False),
    ("DCPO is more accurate than CCGSPG", "dcpo", "ccgspg", "accuracy", False),
    ("DCPO has a lower ECE than GRPO", "dcpo", "grpo", "ece", True),
    ("DCPO has a lower ECE than ConfClass", "dcpo", "confclass", "ece", True),
    ("DCPO has a lower ECE than RLCR", "dcpo", "rlcr", "ece", True),
    ("DCPO has a lower ECE than CCGSPG", "dcpo", "ccgspg", "ece", True),
    ("RLCR has a lower ECE than GRPO", "rlcr", "grpo", "ece", True),
    ("without decoupling accuracy is lower", "dcpo", "coupled", "accuracy", False),
    ("without decoupling ECE is higher", "dcpo", "coupled", "ece", True),
    ("post-hoc training costs accuracy", "grpo", "posthoc", "accuracy", False),
    ("without group labels (DCPO-I) accuracy is lower", "dcpo", "dcpo_i", "accuracy", False),
    ("without group labels (DCPO-I) ECE is higher", "dcpo", "dcpo_i", "ece", True),
    ("without instance labels (DCPO-G) PCE is higher", "dcpo", "dcpo_g", "pce", True),
    ("GRPO's responses are longer than base's", "grpo", "base", "mean_length", False),
)


def claims(rows: Rows) -> list[dict[str, Any]]:
    """The paper's order against ours: ``holds``, ``clear`` when the intervals are disjoint, and the numbers."""
    found = []
    for claim, better, worse, column, lower in CLAIMS:
        if better not in rows or worse not in rows:
            continue
        a, b = interval(rows[better][column]), interval(rows[worse][column])
        holds = a.mean < b.mean if lower else a.mean >= b.mean
        numbers = f"{_shown(column, a)} against {_shown(column, b)}"
        found.append({"claim": claim, "holds": bool(holds), "clear": apart(a, b), "numbers": numbers})
    return found


def claims_table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| the paper's order | here | intervals | numbers |", "|---|---|---|---|"]
    for c in found:
        here, clear = "holds" if c["holds"] else "**does not hold**", "apart" if c["clear"] else "overlap"
        lines.append(f"| {c['claim']} | {here} | {clear} | {c['numbers']} |")
    return "\n".join(lines) + "\n"


def bars_table(found: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| bar | holds | numbers |", "|---|---|---|"]
    lines += [f"| {b['bar']} | {'yes' if b['holds'] else '**no**'} | {b['numbers']} |" for b in found]
    return "\n".join(lines) + "\n"
