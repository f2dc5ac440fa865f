"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path


def below(pid: int) -> list[int]:
    """All descendants of ``pid``; none of a process that is gone."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return []
    return children + [more for child in children for more in below(child)]


def left_after(pids: Sequence[int], seconds: float) -> list[int]:
    """Which of ``pids`` still run ``seconds`` later; returns at once when none does."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if _running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
