"""The values that every table of results has, and the text of their cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeGuard

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
