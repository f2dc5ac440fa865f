"""The machine of a plan: its devices, and the rates at which they work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_dcpo.architectures.architecture import Architecture
from megatron_dcpo.config import Config
from megatron_dcpo.weights.layout import Layout

GB = 1e9
# The libraries of a process on the CPU, torch, Megatron and transformers: benchmarks/RESULTS.md
LIBRARIES_GB = 1.0
_MEASURED_SECONDS = 0.2


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
    """What the estimate assumes of the machine; the defaults are those of an H100.

    From its data sheet: dense bf16 TFLOP/s, GB/s of memory, of a GPU's link within its node, and of
    its link to other nodes. Assumed: the share of the memory's speed that is reached, and the
    microseconds of a small all-reduce within a node.

    The six others are fitted to published steps (``benchmarks/published_steps.py``). ``mfu`` and
    ``expert_mfu`` are the shares of the peak that the products of a training pass reach, those of
    experts apart. A decoding step takes ``decode_layer_us`` for each layer and
    ``decode_sequence_us`` for each running sequence, whatever is read and computed, and
    ``across_nodes_ms`` more if an engine is larger than a node. ``changeover_seconds`` is what a
    step takes to change between training and generation on the same GPUs.
    """

    peak_tflops: float = 989.0
    mfu: float = 0.4
    hbm_gbps: float = 3350.0
    nvlink_gbps: float = 450.0
    link_gbps: float = 50.0
    gpus_per_node: int = 8
    hbm_share: float = 0.8
    all_reduce_us: float = 12.0
    expert_mfu: float = 0.061
    decode_layer_us: float = 61.0
    decode_sequence_us: float = 87.0
    across_nodes_ms: float = 15.0
    changeover_seconds: float = 12.0

    def bytes_per_second(self, ranks: int) -> float:
        """Return the speed of the link between ``ranks`` consecutive GPUs: that within a node, if
        they are in one.
        """
        if ranks <= self.gpus_per_node:
            return self.nvlink_gbps * 1e9
        return self.link_gbps * 1e9


def this_machine(
    config: Config, arch: Architecture, response_tokens: int = 0
) -> tuple[Machine, Rates]:
    """Return the machine on which ``dcpo plan`` runs, and its rates: its GPUs, or else as many
    processes on the CPU as the layout needs, which share the memory and the speed that is measured
    here.
    """
    # it imports torch, which a plan for other machines does without
    from megatron_dcpo.runtime import device

    gpus = device.device_count()
    if gpus:
        machine = Machine(
            gpus=gpus, gpu_memory_gb=device.total_memory() / GB, response_tokens=response_tokens
        )
        tflops = device.peak_tflops() or Rates.peak_tflops
        return machine, Rates(peak_tflops=tflops, gpus_per_node=gpus)
    layout = Layout.of(config.parallel)
    parallel = config.parallel
    ranks = layout.width * layout.pipeline_model_parallel_size * parallel.context_parallel_size
    processes = math.lcm(ranks, config.rollout.ranks_of_an_engine)
    machine = Machine(
        gpus=processes,
        gpu_memory_gb=device.host_memory_total() / GB / processes,
        reserve_gb=LIBRARIES_GB,
        response_tokens=response_tokens,
        processor="cpu",
    )
    tflops, gbps = _measure(arch, config.model.params_dtype)
    return machine, Rates(
        peak_tflops=tflops / processes,
        mfu=1.0,
        hbm_gbps=gbps / processes,
        nvlink_gbps=gbps / processes,
        link_gbps=gbps / processes,
        gpus_per_node=processes,
        hbm_share=1.0,
        all_reduce_us=0.0,
        expert_mfu=1.0,
        decode_layer_us=0.0,
        decode_sequence_us=0.0,
        across_nodes_ms=0.0,
        changeover_seconds=0.0,
    )


def _measure(arch: Architecture, params_dtype: str) -> tuple[float, float]:
    """Return the TFLOP/s of a product of 512 tokens with a weight of the model's MLP, and the GB/s
    of a copy.
    """
    import torch

    from megatron_dcpo.runtime.dtypes import torch_dtype

    dtype = torch_dtype(params_dtype)
    hidden = arch.hidden_size
    ffn = arch.ffn_hidden_size
    tokens = torch.ones(512, hidden, dtype=dtype)
    weight = torch.ones(hidden, ffn, dtype=dtype)
    flops = 2 * 512 * hidden * ffn / _seconds(lambda: tokens @ weight)
    source = torch.ones(2**24)
    target = torch.ones(2**24)
    bytes_per_second = 2 * 4 * 2**24 / _seconds(lambda: target.copy_(source))
    return flops / 1e12, bytes_per_second / GB


def _seconds(call: Callable[[], object]) -> float:
    call()
    calls = 0
    spent = 0.0
    started = time.perf_counter()
    while spent < _MEASURED_SECONDS:
        call()
        calls += 1
        spent = time.perf_counter() - started
    return spent / calls
