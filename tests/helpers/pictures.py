"""Evaluations and reports without pictures: dozens of them take most of the time on small data."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Take the place of ``diagrams.save``."""
    return []


def inline_svg(figure: Figure, label: str) -> str:
    """Take the place of ``diagrams.inline_svg``."""
    return "<svg></svg>"
