"""The machine of a plan: its devices, and the rates at which they work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GB = 1e9


@dataclass(frozen=True)
class Machine:
    """The devices of a run, which its configuration does not name.

    gpus: their number, or the number of processes if the ``processor`` is a CPU.
    gpu_memory_gb: the memory of each.
    reserve_gb: for the CUDA context, NCCL's buffers, fragmentation, and a sleeping engine.
    response_tokens: the mean length of a response; 0 stands for the longest allowed.
    engine_gpus: the GPUs of ``rollout.engine=server``, in addition to ``gpus``; 0 if not planned.
    """

    gpus: int
    gpu_memory_gb: float = 80.0
    reserve_gb: float = 5.0
    response_tokens: int = 0
    processor: Literal["gpu", "cpu"] = "gpu"
    engine_gpus: int = 0


@dataclass(frozen=True)
class Rates:
    """What the estimate assumes of the machine: dense bf16 TFLOP/s and the share of it reached
    (``mfu``), GB/s of memory, of a GPU's link within its node, and of its link to other nodes. The
    defaults are those of an H100.
    """

    peak_tflops: float = 989.0
    mfu: float = 0.4
    hbm_gbps: float = 3350.0
    nvlink_gbps: float = 450.0
    link_gbps: float = 50.0
    gpus_per_node: int = 8

    def bytes_per_second(self, ranks: int) -> float:
        """Return the speed of the link between ``ranks`` consecutive GPUs: that within a node, if
        they are in one.
        """
        if ranks <= self.gpus_per_node:
            return self.nvlink_gbps * 1e9
        return self.link_gbps * 1e9
