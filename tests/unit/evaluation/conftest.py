"""Fixtures of the tests of evaluation."""

from __future__ import annotations

import pytest

from megatron_dcpo.calibration import diagrams
from tests.helpers import pictures


@pytest.fixture(autouse=True)
def without_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no diagram, but in tests that look at pictures, which are marked ``draws``."""
    if not request.node.get_closest_marker("draws"):
        for name, function in pictures.NONE.items():
            monkeypatch.setattr(diagrams, name, function)
