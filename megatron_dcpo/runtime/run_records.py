"""Files of a run directory that several subpackages read: ``run.json``, an entry for every start,
and ``warnings.jsonl``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from statistics import median
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import read_json_object

CONFIG = "config.yaml"
RUN = "run.json"
WARNINGS = "warnings.jsonl"
ADAPTER = "adapter"  # the directory of the adapter that is trained
_RECENT = 10  # steps whose median time predicts the remaining ones


def read_launches(directory: Path) -> list[dict[str, Any]]:
    """Return the entries of ``run.json``, oldest first; none if it is missing or damaged."""
    try:
        found = read_json_object(directory / RUN).get("launches")
    except (OSError, UserError):
        return []
    if isinstance(found, list):
        return [one for one in found if isinstance(one, dict)]
    return []


@functools.cache
def today() -> date:
    """Return the date of the first call in this process: all its prompts have the same."""
    return datetime.now().date()


def parse_date(text: object) -> date | None:
    """Return the date in a record, None for anything else."""
    with suppress(ValueError, TypeError):
        return date.fromisoformat(str(text))
    return None


def first_date(launches: Sequence[Mapping[str, Any]]) -> date | None:
    """Return the date that the chat template wrote when a run was started, from its launches, the
    oldest first. For launches of a release that did not record it: the day of the last start from
    step 0.
    """
    for launch in reversed(launches):
        recorded = parse_date(launch.get("date"))
        if recorded is not None:
            return recorded
        if launch.get("after_step") == 0:
            with suppress(ValueError, TypeError):
                started = datetime.fromisoformat(str(launch.get("time")))
                return started.replace(tzinfo=started.tzinfo or UTC).astimezone().date()
    return None


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


def seconds_left(rows: Sequence[Mapping[str, Any]], steps: int) -> float | None:
    """Return how long the remaining ``steps`` will take, from the median of the last steps; None if
    none was timed.
    """
    recent = [row["time/step"] for row in rows if row.get("time/step")][-_RECENT:]
    if not recent:
        return None
    return steps * float(median(recent))


def differing(*settings: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each name, in order, whose values are not the same in all ``settings``, with its value
    in each, None where it has none.
    """
    for name in sorted(set().union(*settings)):
        values = [one.get(name) for one in settings]
        if any(value != values[0] for value in values):
            yield name, values
