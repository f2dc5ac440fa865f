"""The kernels of Transformer Engine's optimizers, which take tensors of a GPU only: here each says
so, as the real ones do.
"""

from __future__ import annotations

from typing import Any

import torch


def multi_tensor_applier(op: Any, flag: torch.Tensor, lists: Any, *arguments: Any) -> Any:
    return op(2048 * 32, flag, lists, *arguments)


def multi_tensor_l2norm(*_: Any) -> Any:
    raise RuntimeError("multi_tensor_l2norm: expected tensors on CUDA")


def multi_tensor_scale(*_: Any) -> Any:
    raise RuntimeError("multi_tensor_scale: expected tensors on CUDA")


class FusedAdam(torch.optim.Adam):
    def step(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("multi_tensor_adam: expected tensors on CUDA")


class FusedSGD(torch.optim.SGD):
    def step(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("multi_tensor_sgd: expected tensors on CUDA")
