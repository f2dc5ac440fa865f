"""The device of this process, what it can do, and the collective backend that goes with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


def has_cuda() -> bool:
    return torch.cuda.is_available()


@dataclass(frozen=True)
class Capabilities:
    """The properties of the device that other subpackages need, instead of asking for CUDA.

    separate_memory: whether the device's memory is not the host's, so that moving data there and
        back makes room, and a sleeping engine gives memory back.
    cpu_initialization: whether Megatron creates parameters on the host.
    transformer_engine: whether its kernels can run.
    cuda_graphs: whether engines may capture them.
    attention_head_sizes: the sizes for which vLLM's attention has kernels; None for any.
    expert_hidden_multiple: the number of which its kernels for experts require the hidden size to
        be a multiple.
    fp32_products: whether a product of bf16 matrices is available in fp32, as it is accumulated.
    masked_grouped_attention: whether torch's attention has a kernel for a mask and grouped queries;
        without one it would materialize the scores.
    width_multiple: the number of tokens of which the width of a padded micro-batch is a multiple,
        so that there are few widths: cuDNN makes a graph of its attention for each, in tens of
        milliseconds.
    """

    separate_memory: bool
    cpu_initialization: bool
    transformer_engine: bool
    cuda_graphs: bool
    attention_head_sizes: tuple[int, ...] | None
    expert_hidden_multiple: int = 1
    fp32_products: bool = False
    masked_grouped_attention: bool = True
    width_multiple: int = 1


class DeviceLost(RuntimeError):
    """The process cannot get back what it holds, or needs, on the device; it has to end."""


# The words, in lower case, by which torch, vLLM's allocator, Transformer Engine, cuBLAS, cuDNN and
# NCCL report failures that a new process may not meet again; torch.AcceleratorError is a
# RuntimeError with such a text. Wrong arguments are not among them, because they would fail again.
_DEVICE_FAILURES = (
    "cuda error",
    "cuda driver error",
    "cuda failure",
    *(f"cublas_status_{what}" for what in ("execution_failed", "internal_error", "mapping_error")),
    "the gpu program failed to execute",  # cublasGetStatusString of the same three
    "an internal operation failed",
    "an access to gpu memory space failed",
    *(f"cudnn_status_{what}" for what in ("execution_failed", "internal_error", "mapping_error")),
    *(
        f"nccl{what}"
        for what in ("unhandledcudaerror", "systemerror", "internalerror", "remoteerror")
    ),
    "unhandled system error",  # ncclGetErrorString of the same four; the first is above
    "internal error - please report this issue to the nccl developers",
    "remote process exited or there was a network error",
)
_NO_MEMORY = ("out of memory", "status_alloc_failed", "the resource allocation failed")

_CPU = Capabilities(
    separate_memory=False,
    cpu_initialization=True,
    transformer_engine=False,
    cuda_graphs=False,
    attention_head_sizes=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    expert_hidden_multiple=32,
)
_GPU = Capabilities(
    separate_memory=True,
    cpu_initialization=False,
    transformer_engine=True,
    cuda_graphs=True,
    attention_head_sizes=None,
    fp32_products=True,
    masked_grouped_attention=False,
    width_multiple=64,
)


# the device of a rehearsal (runtime/rehearsed_world.py), which does not exist
_rehearsed: torch.device | None = None


def rehearse_on(device: torch.device | None) -> None:
    """Let ``device`` stand for a GPU in this process; None ends that."""
    global _rehearsed
    _rehearsed = device


def capabilities() -> Capabilities:
    """Return the capabilities of the device that this process computes on."""
    return _GPU if has_cuda() or _rehearsed is not None else _CPU


def fp32_head(head_dtype: str) -> bool:
    """Return whether logits are computed in fp32, given ``model.head_dtype``: ``fp32``, ``model``
    or ``auto``.
    """
    return head_dtype == "fp32" or (head_dtype == "auto" and capabilities().fp32_products)


def fp32_product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write ``a @ b`` of two bf16 matrices to ``out`` in fp32, without rounding to bf16 in between.
    On the CPU this uses fp32 copies and serves for comparisons.
    """
    if a.device.type != "cpu":
        return torch.mm(a, b, out_dtype=torch.float32, out=out)
    return torch.mm(a.float(), b.float(), out=out)


def add_fp32_product(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add ``a @ b`` of two bf16 matrices, on a GPU, to ``sums`` in fp32, as it is accumulated: the
    product is neither rounded nor written.
    """
    torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)


def current_device() -> torch.device:
    """Return the device of this process: its own GPU (by ``LOCAL_RANK``), or the CPU."""
    if _rehearsed is not None:
        return _rehearsed
    if has_cuda():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def backend() -> str:
    """Return the backend of the default process group. Objects travel over gloo, from the host,
    even if tensors travel over NCCL.
    """
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


@contextlib.contextmanager
def profile(path: Path) -> Iterator[None]:
    """Write what torch and the device did inside the block as a trace, ``path`` (.json.gz;
    chrome://tracing, Perfetto).
    """
    activities = [
        torch.profiler.ProfilerActivity.CPU,
        *[torch.profiler.ProfilerActivity.CUDA] * has_cuda(),
    ]
    with torch.profiler.profile(activities=activities) as trace:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))


def synchronize() -> None:
    """Wait for the device, so that a phase timer measures the phase. Does nothing on the CPU."""
    if has_cuda():
        torch.cuda.synchronize()


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Have what a thread puts on the device inside the block run at the same time as what other
    threads put there. Waits for it at the end of the block, unless the block raises. Does nothing
    on the CPU.
    """
    if not has_cuda():
        yield
        return
    torch.cuda.set_device(current_device())  # a thread begins with the first one
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``numel`` numbers in the host's memory, from and to which the device copies at full
    speed.
    """
    return torch.empty(numel, dtype=dtype, pin_memory=has_cuda())


def to_device(
    values: np.ndarray | Sequence[float], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``values`` of the host as a tensor on the device. Neither side waits for the other."""
    tensor = torch.tensor(values, dtype=dtype)
    if has_cuda():
        tensor = tensor.pin_memory()
    return tensor.to(current_device(), non_blocking=True)


def total_memory() -> int:
    """Return the bytes of the device's own memory, 0 if it has none."""
    return torch.cuda.mem_get_info()[1] if has_cuda() else 0


def multiplies_in_fp8() -> bool:
    """Return whether this process's GPU has products of FP8 numbers: from Ada on (compute
    capability 8.9). True without a GPU.
    """
    return not has_cuda() or torch.cuda.get_device_capability() >= (8, 9)


def device_name() -> str:
    """Return the name of this process's GPU, or ``cpu``."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def device_count() -> int:
    """Return the number of GPUs that this process sees; 0 on the CPU."""
    return torch.cuda.device_count() if has_cuda() else 0


def host_memory_available() -> int:
    """Return the bytes of the host's memory that can be had without swapping."""
    return _host_memory("MemAvailable:")


def host_memory_total() -> int:
    """Return the bytes of the host's memory."""
    return _host_memory("MemTotal:")


def _host_memory(name: str) -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


# Dense bf16 TFLOP/s by what a card's name contains; the first that fits.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H20": 148.0,
    "A100": 312.0,
}


def peak_tflops() -> float | None:
    """Return the dense bf16 TFLOP/s of this process's GPU by its name; None on the CPU and for
    cards that are not in the table.
    """
    name = device_name()
    return next((peak for card, peak in _PEAK_TFLOPS.items() if card in name), None)


def empty_cache() -> None:
    """Give the memory that torch keeps for later back to the device. Does nothing on the CPU."""
    if has_cuda():
        torch.cuda.empty_cache()


def expandable_segments(on: bool) -> None:
    """Set whether torch's allocator grows its segments: it does in training, in which sizes change,
    and does not around an engine, whose memory pools do not allow it. Cached memory is given back.
    Does nothing on the CPU, or if the environment decides.
    """
    setting = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if not has_cuda() or "expandable_segments" in setting:
        return
    from megatron_dcpo.runtime.megatron_private import set_allocator_settings

    synchronize()
    empty_cache()
    # the whole setting: torch forgets what is not named again
    set_allocator_settings(",".join([*filter(None, [setting]), f"expandable_segments:{on}"]))


def disable_cudnn_attention() -> None:
    """Leave torch's attention to its other kernels: cuDNN's makes a graph for every length, and in
    sampling every token has another one. Transformer Engine's attention calls cuDNN itself and is
    not concerned. Does nothing on the CPU.
    """
    if has_cuda():
        torch.backends.cuda.enable_cudnn_sdp(False)


def device_failed(error: BaseException | None) -> bool:
    """Return whether ``error``, or its cause, is a failure of the device itself (an illegal
    address, a lost card) or of its connection to others, and not a lack of memory. Nothing in this
    process can use the device after it, neither the policy nor an engine.
    """
    causes = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    if any(isinstance(cause, DeviceLost) for cause in causes):
        return True
    for cause in causes:
        text = str(cause).lower()
        if isinstance(cause, torch.OutOfMemoryError) or any(sign in text for sign in _NO_MEMORY):
            return False
        if isinstance(cause, RuntimeError) and any(sign in text for sign in _DEVICE_FAILURES):
            return True
    return False


def memory_gb() -> dict[str, float]:
    """Return the memory of this process in GB: ``rss`` resident on the host; with CUDA ``cuda``
    allocated by torch now, ``cuda_peak`` at most since the last call, and ``device`` in use on the
    GPU by anyone (a sleeping engine's too).
    """
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    ledger = {"rss": resident / 1e9}
    if has_cuda():
        free, total = torch.cuda.mem_get_info()
        ledger |= {
            "cuda": torch.cuda.memory_allocated() / 1e9,
            "cuda_peak": torch.cuda.max_memory_allocated() / 1e9,
        }
        ledger["device"] = (total - free) / 1e9
        torch.cuda.reset_peak_memory_stats()
    return ledger


def rng_state() -> torch.Tensor:
    """State of the device's generator, on the host."""
    if has_cuda():
        return torch.cuda.get_rng_state().cpu()
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Put back what :func:`rng_state` returned."""
    if has_cuda():
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def set_threads() -> None:
    """Set one intra-op thread per process on the CPU, unless ``OMP_NUM_THREADS`` says otherwise.

    With several ranks on a few cores, or with matrices of a few hundred rows, the barriers of a
    thread pool cost more than the second thread brings: measured 3-8 times on 64-128 wide models.
    """
    if not has_cuda() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
