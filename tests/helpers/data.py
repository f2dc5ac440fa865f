"""Files of problems: the real ones, where they are present, and small ones of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.paths import DATA


def real(file: str) -> Path:
    if not (DATA / file).exists():
        pytest.skip(f"data file {file} is not here; set DCPO_DATA to the directory that has it")
    return DATA / file


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path
