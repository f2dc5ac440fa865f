"""``test.json`` and ``test_tables.md``: the tables of the test, from ``docs/lab/test_records.tar.xz`` alone.

Rows that need no training of their own are computed here from GRPO's responses, or from the adapter's: ``FITTED`` on the
validation problems, never on the test's.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lab.grid import METHODS
from lab.results import crossed, read_archive, rounded
from lab.runner import EXAMPLES
from megatron_dcpo.calibration import (
    accuracy_at_coverage,
    aurc,
    auroc,
    bin_rows,
    binned_error,
    brier,
    ece,
    json_ready,
    null_ece,
)
from megatron_dcpo.data.datasets import read_json_lines
from megatron_dcpo.errors import UserError

RECORDS = "test_records.tar.xz"
POLICIES = MappingProxyType({"large": "qwen3_3", "qwen3": "qwen3_2", "llama": "llama"})  # as test.json names them
METRICS = ("accuracy", "pass_at_8", "ece", "brier", "auroc", "skill", "ece_ood", "aurc", "accuracy_at_80", "utility")
TITLES = {name: method.title for name, method in METHODS.items()} | {
    "lookup": "lookup, one number per type",
    "consistency": "agreement of 8 samples",
    "logprob": "log-prob of the reasoning, isotonic",
    "adapter_isotonic": "adapter, isotonic",
    "adapter_tokens_isotonic": "adapter, tokens of its own, isotonic",
}


@dataclass(frozen=True)
class Records:
    """Judged responses [N] to one part, in the order of the problems. ``confidence`` is NaN where none was stated."""

    problem: np.ndarray
    kind: np.ndarray
    correct: np.ndarray
    confidence: np.ndarray
    logprob: np.ndarray
    answer: np.ndarray

    def stating(self, confidence: np.ndarray) -> Records:
        return replace(self, confidence=confidence)


Run = Mapping[str, Records]  # part -> responses of one policy under one method
Runs = dict[tuple[str, int, int], dict[str, Run]]  # (family, pretraining, seed of RL) -> method -> run
Family = Mapping[int, Sequence[Mapping[str, Run]]]  # pretraining -> seeds of RL, in order; the first has every row


def load(archive: Path, data: Path = EXAMPLES / "data") -> Runs:
    """The responses of all cells to the problems of ``data``. Raises :class:`UserError` without an archive."""
    if not archive.is_file():
        raise UserError(f"{archive}: no records; make them with: python -m lab test, then test-tables --grid")
    kinds = {path.stem: np.array([r["type"] for _, r in read_json_lines(path)]) for path in data.glob("*.jsonl")}
    runs: Runs = {}
    for path, content in sorted(read_archive(archive).items()):
        policy, method, seed, file = path.split("/")
        part = file.removesuffix(".csv")
        if part in (*kinds, "decoding"):
            family, _, pretraining = policy.partition(".")
            run = runs.setdefault((family, int(pretraining or 0), int(seed)), {}).setdefault(method, {})
            assert isinstance(run, dict)
            column = "token" if method in METHODS and METHODS[method].confidence == "token" else "confidence"
            run[part] = _records(content, kinds["test" if part == "decoding" else part], column)
    return runs


def _records(content: bytes, kinds: np.ndarray, column: str = "confidence") -> Records:
    """``column``: the kind of confidence that the row is made for."""
    rows = list(csv.DictReader(io.StringIO(content.decode())))
    rows.sort(key=lambda row: int(row["problem"]))
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    problem = np.array(columns["problem"], int)
    confidence, logprob = (np.array([float(v) if v else math.nan for v in columns[k]]) for k in (column, "logprob"))
    correct = np.array(columns["correct"], float)
    return Records(problem, kinds[problem], correct, confidence, logprob, np.array(columns["answer"]))


# ------------------------------------------------------------------------------------------------ fitted rows
def isotonic(x: np.ndarray, y: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    from sklearn.isotonic import IsotonicRegression

    known = ~np.isnan(x)
    model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(x[known], y[known])
    return lambda new: np.where(np.isnan(new), y.mean(), model.predict(np.nan_to_num(new)))


def lookup(fit: Records) -> Callable[[Records], np.ndarray]:
    """The accuracy on the type of problem, of all types where the type is new."""
    table = {kind: fit.correct[fit.kind == kind].mean() for kind in np.unique(fit.kind)}
    return lambda r: np.array([table.get(kind, fit.correct.mean()) for kind in r.kind])


def agreement(r: Records) -> np.ndarray:
    """Share of the problem's responses with the same answer."""
    keys = np.array([f"{p} {a}" for p, a in zip(r.problem, r.answer, strict=True)])
    _, group, count = np.unique(keys, return_inverse=True, return_counts=True)
    return count[group] / np.bincount(r.problem)[r.problem]


Fit = Callable[[Records], Callable[[Records], np.ndarray]]


def _isotonic_of(column: str) -> Fit:
    def fit(records: Records) -> Callable[[Records], np.ndarray]:
        model = isotonic(getattr(records, column), records.correct)
        return lambda r: model(getattr(r, column))

    return fit


FITTED: Mapping[str, tuple[str, Fit]] = MappingProxyType(
    {
        "lookup": ("grpo", lookup),
        "logprob": ("grpo", _isotonic_of("logprob")),
        "adapter_isotonic": ("adapter", _isotonic_of("confidence")),
        "adapter_tokens_isotonic": ("adapter_tokens", _isotonic_of("confidence")),
    }
)


def with_fitted(runs: dict[str, Run]) -> dict[str, Run]:
    """The trained rows and those made of them. On the validation problems a fitted row is fitted on the other half."""
    found = dict(runs)
    for name, (start, fit) in FITTED.items():
        if "heldout" not in runs.get(start, {}):
            continue
        fitted, parts = runs[start]["heldout"], {}
        for part, records in runs[start].items():
            parts[part] = records.stating(fit(fitted)(records))
        halves = fitted.problem % 2 == 0
        stated = np.empty(len(halves))
        for half in (halves, ~halves):
            stated[half] = fit(_rows(fitted, ~half))(_rows(fitted, half))
        found[name] = parts | {"heldout": fitted.stating(stated)}
    if "grpo" in runs:
        found["consistency"] = {part: records.stating(agreement(records)) for part, records in runs["grpo"].items()}
    return found


def _rows(r: Records, chosen: np.ndarray) -> Records:
    return Records(*(getattr(r, name)[chosen] for name in (f.name for f in fields(r))))


# ------------------------------------------------------------------------------------------------ metrics
def pass_at(k: int, r: Records) -> float:
    """Unbiased estimate (Chen et al. 2021): mean over problems of 1 - C(n - right, k) / C(n, k) for n responses each."""
    n = np.bincount(r.problem)
    right = np.bincount(r.problem, weights=r.correct).astype(int)
    return float(np.mean([1 - math.comb(a - b, k) / math.comb(a, k) for a, b in zip(n, right, strict=True) if a]))


def skill(r: Records) -> float:
    """1 - Brier / Brier of the lookup that states the method's own accuracy on each type."""
    own = lookup(r)(r)
    return 1 - brier(r.confidence, r.correct) / brier(own, r.correct)


def utility(r: Records) -> float:
    """Right +1, wrong -1, not answered 0, per question; answered where the confidence is at least a half."""
    return float(((2 * r.correct - 1) * (np.nan_to_num(r.confidence, nan=-1) >= 0.5)).mean())


def scores(run: Run, part: str = "test") -> dict[str, float]:
    """``METRICS`` of one policy under one method; NaN where the part was not sampled."""
    r, ood = run[part], run.get("ood")
    c, y = r.confidence, r.correct
    least = int(np.bincount(r.problem).min())
    return {
        "accuracy": float(y.mean()), "pass_at_8": pass_at(8, r) if least >= 8 else math.nan,
        "ece": ece(c, y), "brier": brier(c, y), "auroc": auroc(c, y), "skill": skill(r),
        "ece_ood": ece(ood.confidence, ood.correct) if ood else math.nan,
        "aurc": aurc(c, y), "accuracy_at_80": accuracy_at_coverage(c, y, 0.8), "utility": utility(r),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ what is written
def tables(archive: Path, out: Path) -> dict[str, Any]:
    """Write ``test.json`` and ``test_tables.md``; returns the former. ``best`` is the row with the least Brier score on the
    validation problems of the three-layer policies."""
    runs = {key: with_fitted(methods) for key, methods in sorted(load(archive).items())}
    families: dict[str, Family] = {
        family: {
            number: [r for key, r in runs.items() if key[:2] == (family, number)]
            for number in dict.fromkeys(key[1] for key in runs if key[0] == family)
        }
        for family in POLICIES
    }
    chosen = _validation(families["large"])
    best = min(chosen, key=lambda name: chosen[name])
    policies = {
        POLICIES[family]: {name: _columns(of, name) for name in _names(of)} for family, of in families.items() if of
    }
    band = [null_ece(r[best]["test"].confidence, resamples=400) for _, r in _runs_of(families["large"], best)]
    result = {"best": best, "null_ece_95": float(np.mean(band)), "policies": policies}
    (out / "test.json").write_text(json.dumps(rounded(json_ready(result)), indent=1) + "\n")
    (out / "test_tables.md").write_text(_markdown(families, result, chosen))
    return result


def _runs_of(of: Family, *names: str, part: str = "test") -> list[tuple[int, Mapping[str, Run]]]:
    """Pretraining and rows of every run (one seed on one pretraining) that sampled ``part`` with all of ``names``."""
    return [(n, r) for n, seeds in of.items() for r in seeds if all(part in r.get(name, {}) for name in names)]


def _names(of: Family) -> list[str]:
    return [name for name in TITLES if _runs_of(of, name)]


def _by_pretraining(runs: Sequence[tuple[int, Any]], value: Callable[[Any], Any]) -> list[list[Any]]:
    """[pretrainings][seeds] of ``value``."""
    found: dict[int, list[Any]] = {}
    for number, run in runs:
        found.setdefault(number, []).append(value(run))
    return list(found.values())


def _columns(of: Family, name: str) -> dict[str, list[float]]:
    """``METRICS`` of one row: one number per pretraining, the mean over its seeds."""
    rows = _by_pretraining(_runs_of(of, name), lambda r: scores(r[name]))
    return {key: [float(np.mean([row[key] for row in seeds])) for seeds in rows] for key in METRICS}


def _validation(of: Family) -> dict[str, float]:
    """Brier score on the validation problems, mean over the pretrainings, of the rows that every pretraining has there: of
    its first seed, which all of them have."""
    first = [seeds[0] for seeds in of.values()]
    names = [name for name in TITLES if all("heldout" in r.get(name, {}) for r in first)]
    return {name: float(np.mean([scores(r[name], "heldout")["brier"] for r in first])) for name in names}


def _markdown(families: Mapping[str, Family], result: Mapping[str, Any], chosen: Mapping[str, float]) -> str:
    lines = ["# Tables of the test", "", "Made by `python -m lab test-tables` from `test_records.tar.xz` alone.", ""]
    for family, of in families.items():
        if of:
            lines += [f"## {POLICIES[family]}", "", *_family(of, result["policies"][POLICIES[family]]), ""]
    lines += [
        "## Choice of the best row",
        "",
        "Brier score on the validation problems (fitted rows: on the other half of them).",
        "",
    ]
    lines += [
        "| row | Brier |",
        "|---|---|",
        *(f"| {TITLES[k]} | {v:.4f} |" for k, v in sorted(chosen.items(), key=lambda i: i[1])),
    ]
    return "\n".join(lines) + "\n"


def _family(of: Family, columns: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    lines = ["Mean over the n pretrainings; a pretraining's number is the mean over its seeds of RL.", ""]
    lines += [f"| | n | seeds | {' | '.join(METRICS)} |", "|---" * (len(METRICS) + 3) + "|"]
    for name, row in columns.items():
        seeds = "/".join(str(n) for n in sorted({len(s) for s in _by_pretraining(_runs_of(of, name), id)}))
        shown = " | ".join(f"{np.mean(row[key]):.4f}" for key in METRICS)
        lines.append(f"| {TITLES[name]} | {len(row['accuracy'])} | {seeds} | {shown} |")
    lines += ["", *_spread(of)]
    lines += ["ECE of every run, one pretraining's in the order of their seeds: plug-in, corrected for its bias, 95 %"]
    lines += ["interval over problems; what", BANDS, "", "| | pretraining | " + ECE_COLUMNS]
    for name in columns:
        lines += [f"| {TITLES[name]} | {n} | {ece_interval(r[name]['test'])} |" for n, r in _runs_of(of, name)]
    lines += ["", *_differences(of), "", *ladder(of)]
    lines += ["The paper's decoding (T 0.7, top-p 0.8, top-k 20), mean over pretrainings:", ""]
    lines += ["| | accuracy | ECE | Brier | AUROC |", "|---" * 5 + "|"]
    for name in columns:
        rows = _by_pretraining(_runs_of(of, name, part="decoding"), lambda r, name=name: scores(r[name], "decoding"))
        if rows:
            shown = " | ".join(
                f"{np.mean([np.mean([r[k] for r in seeds]) for seeds in rows]):.4f}"
                for k in ("accuracy", "ece", "brier", "auroc")
            )
            lines.append(f"| {TITLES[name]} | {shown} |")
    return lines


def _spread(of: Family) -> list[str]:
    """Standard deviations of the rows with several seeds on every pretraining; empty where there is none."""
    lines = ["Standard deviation between the seeds of one pretraining / between the pretrainings' means:", ""]
    lines += ["| | accuracy | ECE | Brier | AUROC |", "|---" * 5 + "|"]
    head = len(lines)
    for name in _names(of):
        rows = _by_pretraining(_runs_of(of, name), lambda r, name=name: scores(r[name]))
        if len(rows) < 2 or min(len(seeds) for seeds in rows) < 2:
            continue
        shown = []
        for key in ("accuracy", "ece", "brier", "auroc"):
            values = [[row[key] for row in seeds] for seeds in rows]
            within = math.sqrt(np.mean([np.var(v, ddof=1) for v in values]))
            shown.append(f"{within:.4f} / {np.std([np.mean(v) for v in values], ddof=1):.4f}")
        lines.append(f"| {TITLES[name]} | {' | '.join(shown)} |")
    return [*lines, ""] if len(lines) > head else []


ECE_COLUMNS = "ECE | corrected | interval | calibrated | within problems |\n" + "|---" * 7 + "|"
BANDS = """95 % of calibrated models with these confidences stay below, where labels are independent of
each other ("calibrated"), and where they are as alike within a problem as here."""


def ece_interval(r: Records) -> str:
    """Cells of a table: ECE, corrected for its bias, its interval over problems, both bands of calibrated models."""
    found = binned_error(r.confidence, r.correct, r.problem, resamples=400)
    plain, band = ece(r.confidence, r.correct), null_ece(r.confidence, resamples=200)
    interval = f"{found.estimate:.4f} | {found.low:.4f} to {found.high:.4f}"
    return f"{plain:.4f} | {interval} | {band:.4f} | {band_of_problems(r):.4f}"


def band_of_problems(r: Records, resamples: int = 400) -> float:
    """What the ECE of a calibrated model stays below in 95 % of all cases if what its confidences leave open is as alike
    within a problem as here: a wild bootstrap of problems (simulated: of 92 to 93 %). Too wide where these confidences are
    far from calibrated: residuals are not centred."""
    known = ~np.isnan(r.confidence)
    c, residual, problem = r.confidence[known], (r.confidence - r.correct)[known], r.problem[known]
    index = np.searchsorted(bin_rows(c, r.correct[known]).edges[1:], c)
    of_problem = np.zeros((problem.max() + 1, index.max() + 1))
    np.add.at(of_problem, (problem, index), residual)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(resamples, len(of_problem)))
    return float(np.quantile(np.abs(signs @ of_problem).sum(axis=1) / len(c), 0.95))


ERRORS: tuple[tuple[Callable[[Records], np.ndarray], int], ...] = (
    (lambda r: r.correct, 100),
    (lambda r: (r.confidence - r.correct) ** 2, 1),
)


def _differences(of: Family) -> list[str]:
    """Accuracy (points) and Brier score against GRPO on the runs that have both. A seed belongs to its pretraining, so the
    spread of the pretrainings' means holds the seeds' too: their means are crossed with the problems."""
    lines = ["Minus GRPO, same problems, pretrainings and seeds; ± for others of all three (crossed):", ""]
    lines += ["| | accuracy, points | Brier |", "|---|---|---|"]
    for name in _names(of):
        both = _runs_of(of, name, "grpo")
        if name == "grpo" or not both:
            continue
        shown = []
        for value, unit in ERRORS:
            gaps = _by_pretraining(both, lambda r, name=name, value=value: _gap(r, name, "grpo", value))
            gap = crossed(np.array([np.mean(seeds, axis=0) for seeds in gaps]))
            half = "" if math.isnan(gap.low) else f" ± {unit * (gap.high - gap.mean):.3g}"
            shown.append(f"{unit * gap.mean:+.3g}{half}")
        lines.append(f"| {TITLES[name]} | {' | '.join(shown)} |")
    return lines


# from coupled to decoupled with everything else equal
LADDER = tuple((f"coupled{rung}", f"dcpo{rung}") for rung in ("", "_mean", "_brier", "_brier_mean"))


def ladder(of: Family) -> list[str]:
    """Decoupled minus coupled of each run that has both; empty where none has. The interval is over problems alone
    and says nothing about another pretraining or seed."""
    lines = ["Decoupled minus coupled, everything else equal; ± for other problems alone:", ""]
    lines += ["| | pretraining | accuracy, points | Brier |", "|---|---|---|---|"]
    head = len(lines)
    for coupled, decoupled in LADDER:
        for number, r in _runs_of(of, coupled, decoupled):
            shown = []
            for value, unit in ERRORS:
                gap = _gap(r, decoupled, coupled, value)
                shown.append(f"{unit * gap.mean():+.3g} ± {unit * 1.96 * gap.std(ddof=1) / math.sqrt(len(gap)):.3g}")
            lines.append(f"| {TITLES[decoupled]} - {TITLES[coupled]} | {number} | {' | '.join(shown)} |")
    return [*lines, ""] if len(lines) > head else []


def _gap(r: Mapping[str, Run], one: str, other: str, value: Callable[[Records], np.ndarray]) -> np.ndarray:
    """[problems], one row minus the other."""
    return by_problem(r[one]["test"], value) - by_problem(r[other]["test"], value)


def by_problem(r: Records, value: Callable[[Records], np.ndarray]) -> np.ndarray:
    """Mean of a value over each problem's responses; without a stated confidence a response counts as 0.5."""
    filled = r.stating(np.nan_to_num(r.confidence, nan=0.5))
    return np.bincount(r.problem, weights=value(filled)) / np.bincount(r.problem)
