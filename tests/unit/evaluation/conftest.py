"""Fixtures of the tests of evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megatron_dcpo.calibration import diagrams


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no diagram in tests of other things: dozens of them take most of an evaluation's time on
    small data. Tests that look at pictures are marked ``draws``.
    """
    if request.node.get_closest_marker("draws"):
        return

    def save(figure: Figure, path: str | Path) -> list[Path]:
        return []

    def inline_svg(figure: Figure, label: str) -> str:
        return "<svg></svg>"

    monkeypatch.setattr(diagrams, "save", save)
    monkeypatch.setattr(diagrams, "inline_svg", inline_svg)
