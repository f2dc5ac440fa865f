"""Files of a run directory that several subpackages read: ``run.json``, an entry for every start,
and ``warnings.jsonl``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import read_json_object

CONFIG = "config.yaml"
RUN = "run.json"
WARNINGS = "warnings.jsonl"


def read_launches(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of ``run.json``, oldest first; none if it is missing or damaged."""
    try:
        found = read_json_object(directory / RUN).get("launches")
    except (OSError, UserError):
        return []
    if isinstance(found, list):
        return [one for one in found if isinstance(one, dict)]
    return []


def read_warnings(directory: Path) -> list[dict[str, Any]]:
    """Return the warnings of a run: ``step``, ``watcher``, ``text``; a line that a kill cut off is
    left out.
    """
    path = directory / WARNINGS
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            warning = json.loads(line)
            found.append({key: warning[key] for key in ("step", "watcher", "text")})
        except (ValueError, KeyError, TypeError):
            continue
    return found
