"""The kernels of Transformer Engine's optimizers, which take tensors of a GPU only: here each says
so, as the real ones do.
"""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.pointers import refuse_misread


def multi_tensor_applier(op: Any, flag: torch.Tensor, lists: Any, *arguments: Any) -> Any:
    return op(2048 * 32, flag, lists, *arguments)


def multi_tensor_l2norm(*_: Any) -> Any:
    raise RuntimeError("multi_tensor_l2norm: expected tensors on CUDA")


def multi_tensor_scale(*_: Any) -> Any:
    raise RuntimeError("multi_tensor_scale: expected tensors on CUDA")


def refuse_misread_update(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``Misread`` unless the kernel of Adam reads the numbers of every parameter, gradient
    and moment: it is given their pointers, and the number of elements of the gradient for all.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = getattr(parameter, "decoupled_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if gradient is None:
                continue
            moments = optimizer.state.get(parameter, {})
            read = {"a parameter": parameter.data, "a gradient": gradient.data}
            for name in ("exp_avg", "exp_avg_sq"):
                if name in moments:
                    read[name] = moments[name]
            for name, tensor in read.items():
                refuse_misread(name, tensor, like=parameter)
                assert tensor.numel() == gradient.numel()


class FusedAdam(torch.optim.Adam):
    def step(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("multi_tensor_adam: expected tensors on CUDA")


class FusedSGD(torch.optim.SGD):
    def step(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("multi_tensor_sgd: expected tensors on CUDA")
