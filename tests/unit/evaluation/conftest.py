"""Fixtures of the tests of evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from megatron_dcpo.calibration import diagrams


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save no diagram, for tests of other things: dozens of them take most of an evaluation's time
    on small data.
    """

    def save(figure: Figure, path: str | Path) -> list[Path]:
        return []

    monkeypatch.setattr(diagrams, "save", save)
