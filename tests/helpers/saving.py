"""A writer of checkpoints with a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def unrefreshed(plan: Any, directory: Path, parts: list[Any]) -> list[Any]:
    """Return the buckets of ``saver._refreshed`` with the copies of the save before."""
    buckets = []
    for file in plan.files:
        objects = [(item, stream) for item, _, stream in file.objects]
        tensors = [(item, host) for item, _, host in file.tensors]
        buckets.append((str(directory / file.name), file.name, (objects, tensors)))
    return buckets
