"""What a worker of vLLM does with the messages of a call, by the description of its protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def unpacked(
    told: Mapping[str, list[Any]], limit: int, receive: Callable[[int], Tensor]
) -> dict[str, Tensor]:
    """Return the tensors of a call of which the worker was ``told``. ``receive`` gives the next
    message, of which the worker knows the number of bytes; it ends with the tensor by which it has
    more than ``limit`` bytes, or with the call.
    """
    tensors: dict[str, Tensor] = {}
    waiting: list[tuple[str, torch.dtype, list[int], int]] = []
    last = len(told["names"]) - 1
    for number, name in enumerate(told["names"]):
        dtype = getattr(torch, told["dtype_names"][number])
        shape = told["shapes"][number]
        waiting.append((name, dtype, shape, math.prod(shape) * dtype.itemsize))
        nbytes = sum(size for *_, size in waiting)
        if nbytes <= limit and number < last:
            continue
        message = receive(nbytes)
        assert message.dtype == torch.uint8
        assert message.shape == (nbytes,)
        first = 0
        for one, one_dtype, one_shape, size in waiting:
            tensors[one] = message[first : first + size].view(one_dtype).view(one_shape)
            first += size
        waiting = []
    return tensors
