"""Devices and process groups. The only room that knows whether CUDA exists.

``policy`` and ``checkpoints`` call :func:`ensure` when they are imported, before Megatron is; on a CUDA machine it changes
nothing. Rooms that do without Megatron (rollout, evaluation) do not pay for its import. The names below are imported with
their first use: signals, locks and the number of cores need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dcpo.runtime.devices import (
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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'megatron_on_cpu' if name == 'ensure' else 'devices'}"), name)
