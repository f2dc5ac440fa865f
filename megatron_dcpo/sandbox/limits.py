"""What one program in a sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_dcpo.errors import UserError

GRACE_SECONDS = 5.0  # beyond a wall time that the supervisor keeps itself


@dataclass(frozen=True)
class CodeLimits:
    """What one program may use. ``test_seconds`` and ``program_seconds`` are the wall time of one
    test and of all tests of a program. ``memory_mb`` is address space per process and resident
    memory of all its processes together; ``output_mb`` bounds stdout, a file, and a returned value;
    ``scratch_mb`` its /tmp; ``processes`` includes threads.
    """

    test_seconds: float = 6.0
    program_seconds: float = 60.0
    memory_mb: int = 1024
    output_mb: int = 16
    scratch_mb: int = 64
    processes: int = 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UserError(f"{name} is {value}: it must be positive")
        if self.memory_mb < 128:
            raise UserError(f"memory_mb is {self.memory_mb}: a Python program needs at least 128")

    def message(self) -> dict[str, Any]:
        """Return the limits as the server wants them."""
        return {
            "test_seconds": self.test_seconds,
            "program_seconds": self.program_seconds + GRACE_SECONDS,
            "cpu_seconds": int(self.program_seconds) + 1,
            "memory_bytes": self.memory_mb << 20,
            "checker_bytes": max(2048, 2 * self.memory_mb) << 20,
            "output_bytes": self.output_mb << 20,
            "scratch_bytes": self.scratch_mb << 20,
            "processes": self.processes,
        }
