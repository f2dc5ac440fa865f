"""Means and intervals over seeds. A seed is one training run; runs are few, so the intervals are Student's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from megatron_dcpo.lab.cells import METHODS

SCORES = ("ece", "pce", "brier", "auroc")
COLUMNS = ("accuracy", *SCORES, "violation_rate")


@dataclass(frozen=True)
class Interval:
    """Mean over seeds and its 95 % interval (Student's t); the ends are NaN for a single seed."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if math.isnan(self.low) else f"{self.mean:.3f} ± {self.high - self.mean:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Of n values: mean ± t_{0.975, n-1} sd / sqrt(n)."""
    x = np.asarray(values, dtype=np.float64)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2:
        return Interval(mean, math.nan, math.nan)
    return _students(mean, float(x.var(ddof=1)) / len(x), len(x) - 1)


def _students(mean: float, variance: float, freedom: float) -> Interval:
    """``variance`` is the mean's."""
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return Interval(mean, mean - half, mean + half)


def crossed(differences: np.ndarray) -> Interval:
    """[seeds, problems] -> mean with its 95 % interval for other seeds and other problems.

    Every seed answers the same problems, so both effects are crossed: the variance of the mean is V(seed means)/S +
    V(problem means)/P - V(residual)/(S P), since each of the first two holds the residual's share. Student's t with
    Satterthwaite's degrees of freedom.
    """
    x = np.asarray(differences, dtype=np.float64)
    seeds, problems = x.shape
    mean = float(x.mean())
    if seeds < 2 or problems < 2:
        return Interval(mean, math.nan, math.nan)
    residual = x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + mean
    of_seeds = x.mean(axis=1).var(ddof=1) / seeds
    of_problems = x.mean(axis=0).var(ddof=1) / problems
    of_both = (residual**2).sum() / ((seeds - 1) * (problems - 1)) / (seeds * problems)
    variance = max(of_seeds + of_problems - of_both, of_seeds, of_problems)
    freedom = variance**2 / (of_seeds**2 / (seeds - 1) + of_problems**2 / (problems - 1)) if variance else math.inf
    return _students(mean, float(variance), float(freedom))


def apart(a: Interval, b: Interval) -> bool:
    """Whether two intervals do not overlap. False where one of them is not known."""
    return a.high < b.low or b.high < a.low


def values_by_row(cells: Sequence[Mapping[str, Any]], family: str) -> dict[str, dict[str, list[float]]]:
    """``{method: {"accuracy": [per seed], "ece": ..., ...}}`` of one family, seeds in order, methods as in ``METHODS``.

    A method speaks with the kind of confidence it is made for (CCGSPG with the token's, ConfClass with its classifier's);
    the other kind of base, GRPO and CCGSPG is ``base_token``, ``grpo_token``, ``ccgspg_verbal``.
    """
    rows: dict[str, dict[str, list[float]]] = {}
    for name, method in METHODS.items():
        mine = sorted((c for c in cells if c["family"] == family and c["method"] == name), key=lambda c: c["seed"])
        if not mine:
            continue
        rows[name] = _columns(mine, method.confidence)
        if name in ("base", "grpo"):
            rows[f"{name}_token"] = _columns(mine, "token")
        if name == "ccgspg":
            rows[f"{name}_verbal"] = _columns(mine, "verbal")
    return rows


def _columns(cells: Sequence[Mapping[str, Any]], kind: str) -> dict[str, list[float]]:
    return {
        "seed": [c["seed"] for c in cells],
        "accuracy": [c["accuracy"] for c in cells],
        **{key: [_number(c["scores"][kind][key]) for c in cells] for key in SCORES},
        "mean_confidence": [_number(c["scores"][kind]["mean"]) for c in cells],
        "violation_rate": [c["violation_rate"] for c in cells],
        "mean_length": [c["mean_length"] for c in cells],
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def row_title(name: str) -> str:
    """A row's title; of the second kind of confidence, with that kind."""
    for suffix, kind in (("_token", "token"), ("_verbal", "verbal")):
        if name.endswith(suffix) and name.removesuffix(suffix) in METHODS:
            return f"{METHODS[name.removesuffix(suffix)].title}, {kind}"
    method = METHODS[name]
    return method.title if method.confidence == "verbal" else f"{method.title}, {method.confidence}"
