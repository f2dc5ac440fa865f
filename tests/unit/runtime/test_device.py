"""Which errors mean that the device is gone, and which that its memory ran out."""

import pytest
import torch

from megatron_dcpo.runtime.device import DeviceLost, device_failed


def caused_by(error):
    try:
        raise RuntimeError("weight synchronization, bucket 3 of 9") from error
    except RuntimeError as outer:
        return outer


def _nccl(what, name):
    """As C10D_NCCL_CHECK writes it."""
    return torch.distributed.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
        f"{what}\nnccl{name}: ..."
    )


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (
            RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might "
                "be ..."
            ),
            True,
        ),
        (
            RuntimeError(
                "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error (run with "
                "NCCL_DEBUG=INFO)"
            ),
            True,
        ),
        (caused_by(RuntimeError("CUDA error: uncorrectable ECC error encountered")), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (caused_by(torch.OutOfMemoryError("CUDA out of memory")), False),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("CUDA error in a prompt"), False),
        (None, False),
        # torch 2.13: its own checks, cuBLAS and cuDNN behind it, the driver behind expandable
        # segments
        (
            torch.AcceleratorError(
                "CUDA error: uncorrectable ECC error encountered\nSearch for ..."
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, "
                "opa)`"
            ),
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            False,
        ),
        (RuntimeError("CUDA driver error: unknown error"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED_LAYOUT"), False),
        # vLLM 0.32.0, csrc/cumem_allocator.cpp
        (
            RuntimeError(
                "CUDA Error: an illegal memory access was encountered at "
                "/workspace/csrc/cumem.cpp:245"
            ),
            True,
        ),
        (
            RuntimeError("CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:245"),
            True,
        ),
        (
            RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:112"),
            False,
        ),
        # Transformer Engine 2.11, common/util/logging.h
        (
            RuntimeError(
                "/te/x.cu:9 in function f: CUDA Error: an illegal instruction was encountered"
            ),
            True,
        ),
        (
            RuntimeError(
                "/te/x.cu:9 in function f: cuBLAS Error: the GPU program failed to execute"
            ),
            True,
        ),
        (
            RuntimeError(
                "/te/x.cu:9 in function f: cuBLAS Error: an access to GPU memory space failed"
            ),
            True,
        ),
        (
            RuntimeError("/te/x.cu:9 in function f: cuBLAS Error: the resource allocation failed"),
            False,
        ),
        (
            RuntimeError(
                "/te/x.cu:9 in function f: cuBLAS Error: the functionality is not supported"
            ),
            False,
        ),
        (
            RuntimeError(
                "/te/x.cu:9 in function f: cuDNN Error: CUDNN_STATUS_EXECUTION_FAILED. For more"
            ),
            True,
        ),
        (
            RuntimeError("/te/x.cu:9 in function f: cuDNN Error: CUDNN_STATUS_BAD_PARAM. For more"),
            False,
        ),
        (
            RuntimeError(
                "/te/x.cu:9 in function f: NCCL Error: unhandled system error (run with NCCL_DEBUG"
            ),
            True,
        ),
        # NCCL behind torch, and behind vLLM's own binding
        (
            _nccl(
                "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version "
                "2.29.3",
                "SystemError",
            ),
            True,
        ),
        (
            _nccl(
                "remote process exited or there was a network error, NCCL version 2.29.3",
                "RemoteError",
            ),
            True,
        ),
        (
            _nccl(
                "internal error - please report this issue to the NCCL developers", "InternalError"
            ),
            True,
        ),
        (_nccl("invalid usage (run with NCCL_DEBUG=WARN for details)", "InvalidUsage"), False),
        (
            _nccl(
                "unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
                "UnhandledCudaError",
            ),
            False,
        ),
        (RuntimeError("NCCL error: remote process exited or there was a network error"), True),
        # what this process cannot have back, although it is memory
        (
            DeviceLost(
                "vLLM could not wake up its weights: RuntimeError: CUDA Error: out of memory"
            ),
            True,
        ),
        (caused_by(DeviceLost("vLLM does not start again: out of memory")), True),
    ],
)
def test_a_lost_context_is_told_from_memory_that_ran_out(error, gone):
    assert device_failed(error) is gone
