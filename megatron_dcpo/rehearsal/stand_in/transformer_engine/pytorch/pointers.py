"""Tensors of which the real kernels read the memory at a pointer, in the order of the shape.

The package's C++ makes such a tensor from ``data_ptr()``, sizes and type
(``makeTransformerEngineTensor`` in ``pytorch/csrc/common.cpp``), and checks no strides. What a
kernel would misread is refused here. ``docs/status.md`` has the table.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CUDNN_ALIGNMENT = 16  # bytes, of which cuDNN's attention asks for at the beginning of its tensors


class Misread(RuntimeError):
    """A kernel would read other numbers than those of the tensor."""


def refuse_misread(
    name: str,
    tensor: Tensor,
    like: Tensor,
    dtype: torch.dtype | None = None,
    alignment: int = 1,
    rows_only: bool = False,
) -> None:
    """Raise :class:`Misread` unless a kernel that runs on the device of ``like`` reads the numbers
    of ``tensor``. ``dtype`` is the type that the kernel takes for granted, ``alignment`` that of
    the pointer in bytes. With ``rows_only`` the kernel is told the strides, and only the last one
    has to be 1.
    """
    if tensor.device != like.device:
        raise Misread(f"{name} is on {tensor.device}, the kernel runs on {like.device}")
    if dtype is not None and tensor.dtype != dtype:
        raise Misread(f"{name} is {tensor.dtype}, the kernel reads {dtype}")
    if rows_only and tensor.stride(-1) != 1:
        raise Misread(f"{name} has the strides {tensor.stride()}, the last one has to be 1")
    if not rows_only and not tensor.is_contiguous():
        raise Misread(f"{name} {tuple(tensor.shape)} is not contiguous: {tensor.stride()}")
    if not isinstance(tensor, FakeTensor) and tensor.data_ptr() % alignment:
        raise Misread(f"{name} begins at {tensor.data_ptr():#x}, no multiple of {alignment} bytes")
