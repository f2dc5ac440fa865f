"""Files of problems: the real ones, where they are present, and small ones of our own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import DATA


def real(file: str) -> Path:
    if not (DATA / file).exists():
        pytest.skip(f"data file {file} is not here; set DCPO_DATA to the directory that has it")
    return DATA / file


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def reference_solution(row: Mapping[str, Any]) -> str | None:
    """The reference program that a data set gives, ready to be judged: None where there is none."""
    if "canonical_solution" in row:
        return str(row.get("prompt", "")) + str(row["canonical_solution"])
    for name in ("completion", "solutions", "gold_standard_solution", "code"):
        value = row.get(name)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, str) and value.strip():
            fenced = re.search(r"```(?:python)?\n(.*?)\n?```", value, re.DOTALL)
            return fenced[1] if fenced else value
    return None
