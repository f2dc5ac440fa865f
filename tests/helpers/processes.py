"""Processes of this machine, which may end while they are looked at."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import psutil


def below(pid: int, command: str = "") -> list[int]:
    """All descendants of ``pid`` whose command line has ``command`` in it; none of a process that
    is gone.
    """
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if not command or command in " ".join(child.cmdline()):
                    found.append(child.pid)
    return found


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
