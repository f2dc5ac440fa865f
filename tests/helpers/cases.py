"""Parameters of a test, some of which ``make test`` leaves out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full_only(names: Iterable[str], full: Collection[str]) -> list[Any]:
    """Return ``names`` as parameters; those in ``full`` are for ``make test-full``."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name in full)) for name in names]
