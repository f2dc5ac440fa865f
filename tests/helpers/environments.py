"""The stand-ins for verifiers and NeMo Gym, and their environments."""

from __future__ import annotations

import os

import pytest

from tests.helpers.paths import REPOSITORY

STAND_INS = REPOSITORY / "tests" / "stand_in" / "environments"
COUNTS = STAND_INS / "resources_servers" / "session" / "data" / "example.jsonl"
LETTERS = STAND_INS / "resources_servers" / "letters" / "data" / "example.jsonl"


def use_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this Python have the stand-ins where an environment runs."""
    paths = (str(STAND_INS), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
