"""The optimizer may leave the device for a rollout, when the engine needs the room."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_dcpo import runtime
from megatron_dcpo.policy.model import Policy

logger = logging.getLogger(__name__)


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
