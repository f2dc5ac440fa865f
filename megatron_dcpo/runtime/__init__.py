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


def ensure() -> None:
    """Make Megatron-core importable and runnable on this machine. Idempotent; a no-op with CUDA."""
    from megatron_dcpo.runtime import megatron_on_cpu

    megatron_on_cpu.ensure()


__all__ = ["backend", "check_world_size", "device", "ensure", "has_cuda", "memory_gb", "set_threads", "synchronize"]
