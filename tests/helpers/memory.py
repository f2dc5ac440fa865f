"""Measured memory against ``dcpo plan``, phase by phase: rows, what is wrong with them, and how
they are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PHASES = ("resting", "update", "save")
GB = 1e9


@dataclass(frozen=True)
class Row:
    """Bytes of the device in one phase: the most that torch had allocated, and the plan's
    number.
    """

    phase: str
    measured: int
    predicted: int

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


def compare(measured: Mapping[str, int], predicted: Mapping[str, int]) -> list[Row]:
    """One row per phase of :data:`PHASES`; KeyError where one was not measured or not planned."""
    return [Row(phase, measured[phase], predicted[phase]) for phase in PHASES]


def problems(rows: list[Row], above: float = 1.1, below: float = 0.6) -> list[str]:
    """Phases in which the plan is not to be relied on: more is used than ``above`` x the plan (a
    run would end for want of memory that was promised), or less than ``below`` x (a run that fits
    would be refused).
    """
    return [
        f"{row.phase}: measured {row.measured / GB:.2f} GB, planned {row.predicted / GB:.2f} GB"
        for row in rows
        if not below <= row.ratio <= above
    ]


def shown(rows: list[Row]) -> str:
    """``resting 1.19/1.20 GB, ...``: measured/planned, for the summary of
    ``tools/gpu_check.sh``.
    """
    return ", ".join(
        f"{row.phase} {row.measured / GB:.2f}/{row.predicted / GB:.2f} GB" for row in rows
    )
