"""Files of a run directory that several subpackages read: ``run.json``, an entry for every start,
and ``warnings.jsonl``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import read_json_object

CONFIG, RUN, WARNINGS = "config.yaml", "run.json", "warnings.jsonl"


def read_launches(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of ``run.json``, oldest first; none where it is not there, or damaged."""
    try:
        found = read_json_object(directory / RUN).get("launches")
    except (OSError, UserError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def read_warnings(directory: Path) -> list[dict[str, Any]]:
    """Return the warnings of a run: ``step``, ``watcher``, ``text``; a line that a kill cut off is
    left out.
    """
    path, found = directory / WARNINGS, []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            warning = json.loads(line)
            found.append({key: warning[key] for key in ("step", "watcher", "text")})
        except (ValueError, KeyError, TypeError):
            continue
    return found
