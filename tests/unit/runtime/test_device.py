"""Which errors mean that the device is gone, and which that its memory ran out."""

import pytest
import torch

from megatron_dcpo.runtime.device import device_failed


def caused_by(error):
    try:
        raise RuntimeError("weight synchronization, bucket 3 of 9") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "gone"),
    [
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)"), True),
        (caused_by(RuntimeError("CUDA error: uncorrectable ECC error encountered")), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (caused_by(torch.OutOfMemoryError("CUDA out of memory")), False),
        (RuntimeError("Connection closed by peer"), False),
        (ValueError("CUDA error in a prompt"), False),
        (None, False),
    ],
)
def test_a_lost_context_is_told_from_memory_that_ran_out(error, gone):
    assert device_failed(error) is gone
