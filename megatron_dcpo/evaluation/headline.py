"""The values that every table of results has: their texts, and which of two is better."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeGuard

from megatron_dcpo.codec import LARGEST

Ends = tuple[float, float]  # of a 95 % interval


@dataclass(frozen=True)
class HeadlineMetric:
    """How a value of the headline is shown: its ``label``, and whether it is a share in percent;
    ``better`` is max or min, None if neither is better.
    """

    label: str
    better: Callable[..., float] | None = None
    in_percent: bool = False


# in the order of the columns
METRICS: Mapping[str, HeadlineMetric] = MappingProxyType(
    {
        "accuracy": HeadlineMetric("Accuracy", better=max, in_percent=True),
        "ece": HeadlineMetric("ECE", better=min),
        "pce": HeadlineMetric("PCE", better=min),
        "brier": HeadlineMetric("Brier", better=min),
        "auroc": HeadlineMetric("AUROC", better=max),
        "auroc_within": HeadlineMetric("Within kinds", better=max),
        "auroc_within_problem": HeadlineMetric("Within problems", better=max),
        "skill": HeadlineMetric("Skill", better=max),
        "mean_confidence": HeadlineMetric("Mean conf.", in_percent=True),
        "violation_rate": HeadlineMetric("Violations", better=min, in_percent=True),
        "n": HeadlineMetric("n"),
    }
)
HEADLINE = tuple(METRICS)


def format_value(key: str, value: object, ends: Ends | None = None) -> str:
    """Return the text of a table cell. Percentages have one decimal, errors three; an undefined
    value is a dash. The half width of the interval with these ``ends`` follows after ±.
    """
    if not is_number(value):
        return "–"
    if key == "n":
        return f"{value:,.0f}"
    if key in METRICS and METRICS[key].in_percent:
        text = f"{100 * value:.1f}%"
        if ends is not None:
            half = (ends[1] - ends[0]) / 2
            text += f" ± {100 * half:.1f}"
        return text
    text = f"{value:.3f}"
    if ends is not None:
        half = (ends[1] - ends[0]) / 2
        text += f" ± {half:.3f}"
    return text


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a JSON value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST  # not so for NaN, nor for an integer that no float holds


# ------------------------------------------------ the metric of ``training.keep_best``
def value_of(metrics: Mapping[str, float], word: str) -> float:
    """Return the value that ``training.keep_best`` names: ``BENCHMARK/METRIC``, or ``METRIC``, its
    mean over the benchmarks. NaN if there is none.
    """
    benchmark, metric = parts(word)
    wanted = f"evaluation/{benchmark}/{metric}" if benchmark else f"/{metric}"
    values = [value for key, value in metrics.items() if key.endswith(wanted)]
    if not values:
        return math.nan
    return sum(values) / len(values)


def improves(word: str, metrics: Mapping[str, float], best: Mapping[str, float] | None) -> bool:
    """Return whether ``metrics`` are better than ``best``; an undefined value never is."""
    new = value_of(metrics, word)
    if math.isnan(new):
        return False
    old = math.nan if best is None else value_of(best, word)
    if math.isnan(old):
        return True
    better = METRICS[parts(word)[1]].better
    assert better is not None  # check_keep_best
    return new != old and better(new, old) == new


def parts(word: str) -> tuple[str, str]:
    """Return benchmark and metric of ``BENCHMARK/METRIC``; the benchmark may be empty."""
    benchmark, _, metric = word.removeprefix("evaluation/").rpartition("/")
    return benchmark, metric


def mixed_problems(scored: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each benchmark that has several answers to a problem: of how many problems
    its scores within problems are.
    """
    lines = []
    for name, scores in scored.items():
        mixed = scores.get("lookup", {}).get("problems_used")
        if mixed is not None and scores.get("repeats", 1) > 1:
            said = f"{mixed:,} of the {scores['problems']:,} problems have right and wrong answers"
            lines.append(f"{name}: {said}")
    return lines
