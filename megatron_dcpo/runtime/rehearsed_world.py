"""One rank of a job of any size in one process, on a GPU that does not exist.

Tensors are torch's fake ones: they have shape, type and device, and hold nothing. The device is one
that Python registers, so that a tensor which was left on the host meets one on the device as it
would on a GPU, and torch says in which operation. Process groups are torch's fake ones, of the size
that they would have; what other ranks would say is what this rank says.

This module puts in place what torch and Megatron need for that, and nothing else in the package
knows of it: device.py answers for the device, megatron_on_cpu.py sends Megatron's literal "cuda"
there. Which values are real is written in rehearsed_values.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import default_planner
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from megatron_dcpo.runtime import device, distributed
from megatron_dcpo.runtime.megatron_on_cpu import FusedAdam
from megatron_dcpo.runtime.rehearsed_kernels import adam_in_place, attention, norm_of_all
from megatron_dcpo.runtime.rehearsed_values import RehearsedValues, readable

GPU = "gpu"  # the device's name


@dataclass(frozen=True)
class Rank:
    """A rank of a job of ``world_size`` processes, and the GPU that it rehearses on, or the
    CPU.
    """

    rank: int
    world_size: int
    on_gpu: bool = True


@contextmanager
def rehearsed_world(rank: Rank, told: Callable[[Tensor], None]) -> Iterator[None]:
    """Be ``rank`` inside the block. ``told`` is called with every tensor of the device that the
    host reads as a list.
    """
    os.environ |= {
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.world_size),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    if rank.on_gpu:
        _register_device()
        device.rehearse_on(torch.device(GPU, 0))
    dist.init_process_group(
        "fake", rank=rank.rank, world_size=rank.world_size, store=dist.HashStore()
    )
    with ExitStack() as stack:
        replacements = [*_replacements()]
        if rank.on_gpu:
            replacements.append((FusedAdam, "_update", adam_in_place))
        for owner, name, function in replacements:
            stack.enter_context(patch.object(owner, name, function))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(readable(told))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(RehearsedValues())
        try:
            yield
        finally:
            distributed.destroy()
            device.rehearse_on(None)


@contextmanager
def shapes_between_stages(shape: tuple[int, int, int]) -> Iterator[None]:
    """Let the neighbors of this pipeline stage say inside the block that the hidden states which
    they send have this ``shape``.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    def same_shape(
        _: object, sent_next: object, sent_previous: object, from_previous: bool, from_next: bool
    ) -> tuple[list[int] | None, list[int] | None]:
        return list(shape) if from_previous else None, list(shape) if from_next else None

    with patch.object(P2PCommunicator, "_communicate_shapes", same_shape):
        yield


@functools.cache
def _register_device() -> None:
    _setup_privateuseone_for_python_backend(GPU)
    dist.Backend.backend_capability["fake"].append(GPU)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yield owner and name of what a rehearsal replaces, and what takes its place."""
    from megatron.core.dist_checkpointing import state_dict_utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    for module in (dist, dist.distributed_c10d):
        yield module, "new_group", _fake_group(dist.new_group)
        yield module, "all_gather_object", _same_everywhere
        yield module, "gather_object", _gather_object
        yield module, "broadcast_object_list", _unchanged
        yield module, "barrier", _unchanged
    yield torch, "tensor", _tensor(torch.tensor)
    # by which storages are told apart; those of fake tensors are nowhere
    yield torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata
    yield distributed.Collectives, "exchange", _exchange
    yield nn.Module, "_apply", _apply
    yield FakeTensorMode, "avoid_device_init", True  # it would call a kernel to move a constant
    # the generators of a device
    yield CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext()
    # they would find the shards of this rank everywhere, and those of others nowhere
    yield state_dict_utils, "validate_sharding_integrity", _unchanged
    yield default_planner, "_validate_global_plan", lambda *_: []
    yield clip_grads, "l2_norm_impl", norm_of_all
    yield F, "scaled_dot_product_attention", attention


def _fake_group(new_group: Callable[..., Any]) -> Callable[..., Any]:
    def fake_group(*args: object, **keywords: object) -> object:
        keywords.pop("pg_options", None)
        return new_group(*args, **{**keywords, "backend": "fake"})

    return fake_group


def _tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``torch.tensor`` that makes its result on the host and then moves it; torch's own
    calls a kernel of the device.
    """

    def tensor(
        data: object, *, device: torch.device | str | None = None, **keywords: object
    ) -> Tensor:
        made = make(data, **keywords)
        return made if device is None else made.to(device)

    return tensor


def _same_everywhere(object_list: list[object], obj: object, group: object = None) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(
    obj: object, object_gather_list: list[object] | None = None, **_: object
) -> None:
    if object_gather_list is not None:
        _same_everywhere(object_gather_list, obj)


def _unchanged(*_: object, **__: object) -> None:
    """Do nothing, as this rank has what it would get."""


def _exchange(collectives: distributed.Collectives, outgoing: list[object]) -> list[object]:
    return [outgoing[collectives.rank] for _ in collectives.ranks]


def _apply(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    """Apply ``function`` to parameters and buffers, as ``Module._apply`` does, which exchanges fake
    parameters in place and refuses those with a weak reference.
    """
    if recurse:
        for child in module.children():
            child._apply(function)
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        with torch.no_grad():
            new = function(parameter)
        if new.dtype != parameter.dtype or new.device != parameter.device:
            replaced = nn.Parameter(new, parameter.requires_grad)
            # what Megatron marked, and not what says that the tensor is a fake one, and where
            replaced.__dict__ = parameter.__dict__ | replaced.__dict__
            module._parameters[name] = replaced
    for name, tensor in list(module._buffers.items()):
        if tensor is not None:
            module._buffers[name] = function(tensor)
    return module
