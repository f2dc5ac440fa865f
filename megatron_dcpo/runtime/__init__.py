"""Devices, process groups, Megatron-core on the CPU, signals, watchdog, locks, timers.

The only subpackage that asks for CUDA: the others ask ``device.capabilities()``. Importing it
imports no torch.
"""

from __future__ import annotations

import os

# torch reads it at its first allocation: large ones in huge pages, a fifth of the page faults of a
# step on a CPU
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def cores_per_rank() -> int:
    """Return the cores this process may use, divided among the ranks that torchrun started on this
    machine; at least 1.
    """
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
