"""Evaluations and reports without pictures: dozens of them take most of the time on small data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def _save(figure: None, path: str | Path) -> list[Path]:
    return []


def _inline_svg(figure: None, label: str) -> str:
    return "<svg></svg>"


def _no_figure(*data: object, **options: object) -> None:
    return None


FIGURES = (
    *("reliability_diagram", "confidence_histogram", "comparison_grid", "run_panel"),
    *("curve_figure", "stopping_figure", "coverage_figure"),
)
# what takes the places of functions of calibration.diagrams
NONE: dict[str, Callable[..., Any]] = {"save": _save, "inline_svg": _inline_svg}
NONE |= dict.fromkeys(FIGURES, _no_figure)
