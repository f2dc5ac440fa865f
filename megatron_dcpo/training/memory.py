"""Who holds the device's memory when: the engine sleeps while the policy trains, the optimizer may leave for a rollout."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_dcpo import runtime
from megatron_dcpo.policy.model import Policy

logger = logging.getLogger(__name__)

_GROWTH, _GROWTH_BYTES, _SETTLED = 1.2, 2**30, 3  # an alarm: 20 % and 1 GiB more than the phase used in its third step


class OptimizerOffload:
    """Keeps gradients and optimizer state off the device during rollouts where ``wanted``. Nothing to do on the CPU.

    In fp32 the optimizer works on the policy's own parameters, which have to stay: only the gradients leave.
    """

    def __init__(self, policy: Policy, optimizer: Any, wanted: bool) -> None:
        self.policy, self.optimizer = policy, optimizer
        self.active = wanted and runtime.has_cuda()
        self.away = False
        if wanted and not self.active:
            logger.info("training.offload_optimizer_during_rollout: there is no device to offload from, nothing to do")

    def leave(self) -> None:
        """Before the engine wakes up."""
        if self.active and not self.away:
            for chunk in self.policy.chunks:
                chunk.offload_grad_buffers()
            if self.policy.config.bf16:
                self.optimizer.offload_to_cpu()
            self.away = True

    def come_back(self) -> None:
        """Before training; harmless when nothing is away."""
        if self.away:
            for chunk in self.policy.chunks:
                chunk.restore_grad_buffers()
            if self.policy.config.bf16:
                self.optimizer.restore_from_cpu()
            self.away = False

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """For a checkpoint between two rollouts."""
        was_away = self.away
        self.come_back()
        yield
        if was_away:
            self.leave()


class MemoryLedger:
    """``memory.jsonl`` of a run: bytes in use at the end of every phase (of the device; resident, on the CPU).

    Says so once per phase when it keeps growing from step to step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[str, list[int]] = {}
        self._said: set[str] = set()

    def log(self, step: int, phases: Mapping[str, int]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, "unit": "bytes", **phases}) + "\n")
        for phase, used in phases.items():
            seen = self._seen.setdefault(phase, [])
            if len(seen) < _SETTLED:
                seen.append(used)
            elif phase not in self._said and used > max(max(seen) * _GROWTH, max(seen) + _GROWTH_BYTES):
                self._said.add(phase)
                logger.warning(
                    "step %d ends phase %r with %.1f GiB in use, the first steps with %.1f: something is not given back",
                    step, phase, used / 2**30, max(seen) / 2**30,
                )  # fmt: skip
