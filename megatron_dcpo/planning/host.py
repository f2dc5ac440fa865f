"""The machine on which ``dcpo plan`` runs: the devices of a run if no number of GPUs is given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from megatron_dcpo.config import Config
from megatron_dcpo.planning.hub import architecture_of
from megatron_dcpo.planning.machine import GB, Machine, Rates
from megatron_dcpo.runtime.device import device_count, host_memory_total, peak_tflops, total_memory
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.weights.layout import Layout

# The libraries of a process on the CPU, torch, Megatron and transformers: benchmarks/RESULTS.md
LIBRARIES_GB = 1.0
_MEASURED_SECONDS = 0.2


def this_machine(config: Config, response_tokens: int = 0) -> tuple[Machine, Rates]:
    """Return this machine and its rates: its GPUs, or else as many processes on the CPU as the
    layout needs, which share the memory and the speed that is measured here.
    """
    gpus = device_count()
    if gpus:
        machine = Machine(
            gpus=gpus, gpu_memory_gb=total_memory() / GB, response_tokens=response_tokens
        )
        tflops = peak_tflops() or Rates.peak_tflops
        return machine, Rates(peak_tflops=tflops, gpus_per_node=gpus)
    layout = Layout.of(config.parallel)
    parallel = config.parallel
    ranks = layout.width * layout.pipeline_model_parallel_size * parallel.context_parallel_size
    processes = math.lcm(ranks, config.rollout.ranks_of_an_engine)
    machine = Machine(
        gpus=processes,
        gpu_memory_gb=host_memory_total() / GB / processes,
        reserve_gb=LIBRARIES_GB,
        response_tokens=response_tokens,
        processor="cpu",
    )
    tflops, gbps = _measure(config)
    return machine, Rates(
        peak_tflops=tflops / processes,
        mfu=1.0,
        hbm_gbps=gbps / processes,
        nvlink_gbps=gbps / processes,
        link_gbps=gbps / processes,
        gpus_per_node=processes,
    )


def _measure(config: Config) -> tuple[float, float]:
    """Return the TFLOP/s of a product of 512 tokens with a weight of the model's MLP, and the GB/s
    of a copy.
    """
    arch = architecture_of(config.model.path)
    dtype = torch_dtype(config.model.params_dtype)
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
