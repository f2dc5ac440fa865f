"""Devices and process groups. The only room that knows whether CUDA exists.

``policy`` and ``checkpoints`` call :func:`ensure` when they are imported, before Megatron is; on a CUDA machine it changes
nothing. Rooms that do without Megatron (rollout, evaluation) do not pay for its import.
"""

from __future__ import annotations

from megatron_dcpo.runtime.device import (
    backend,
    check_world_size,
    device,
    has_cuda,
    memory_gb,
    set_threads,
    synchronize,
)
from megatron_dcpo.runtime.megatron_on_cpu import ensure

__all__ = ["backend", "check_world_size", "device", "ensure", "has_cuda", "memory_gb", "set_threads", "synchronize"]
