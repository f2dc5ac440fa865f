"""Every private name of Megatron-core and torch that the package uses, in one place; the names that
are replaced to run Megatron on a CPU are in ``megatron_on_cpu.py``.

A new release is checked here first. A name of torch's that moved fails when this module is
imported. Megatron, which not every command needs, is imported by the functions that use it, and
``tests/unit/runtime/test_megatron_private.py`` looks up its names.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MemoryFormat
from torch.distributed.checkpoint.utils import _create_file_view as create_file_view

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

__all__ = [
    "APEX_KERNEL",  # Megatron's own linear layers add weight gradients with it
    "ArchiveReader",  # reads files that torch.save wrote
    "MemoryFormat",  # of a tensor, in the metadata of a checkpoint
    "StorageInfo",  # file, offset and length of a chunk, in the metadata of a checkpoint
    "create_file_view",  # a part of a file as a file
    "default_store",
    "get_layout",  # metadata name a tensor's layout by it
    "main_param_and_states",
    "plan_checkpoint",
    "replace_checkpoint_reader",
    "set_allocator_settings",  # of the device, while the process runs
    "set_element",  # sets an element of a nested state by its path
    "shard_id",
    "use_queue_of_this_process",
    "without_asking_for_apex",
    "wrapper_tensor",
]

get_layout: Any = torch.serialization._get_layout  # type: ignore[attr-defined]
ArchiveReader: Any = torch._C.PyTorchFileReader
# an NVIDIA image's alpha of torch 2.10 may have the older name alone
set_allocator_settings: Any = getattr(
    torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings
)
APEX_KERNEL = "fused_weight_gradient_mlp_cuda"
SomeTensor = TypeVar("SomeTensor", bound=Tensor)


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def wrapper_tensor(cls: type[SomeTensor], shape: Sequence[int], like: Tensor) -> SomeTensor:
    """Return a tensor of the subclass ``cls`` that has a shape and no storage, with type and device
    of ``like``.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, tuple(shape), dtype=like.dtype, device=like.device
    )  # type: ignore


def replace_checkpoint_reader(reader: Callable[..., Any], planner: type) -> None:
    """Make Megatron's loader read files with the object that ``reader(directory, cache_metadata)``
    returns, and plan with ``planner``.
    """
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    strategy._get_filesystem_reader = reader
    strategy.MCoreLoadPlanner = planner  # type: ignore[misc]


def plan_checkpoint(sharded: dict[str, Any], directory: Path) -> tuple[Any, Any]:
    """Return Megatron's plan of a save: its writer with this rank's part, and on the first rank the
    metadata. Megatron's way of carrying it out (with processes, and collectives during the writing)
    is not used.
    """
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class Planner(TorchDistSaveShardedStrategy):
        def _get_save_and_finalize_callbacks(
            self, writer: object, planned: tuple[object, ...], *_: object
        ) -> tuple[object, object]:
            return writer, planned[1]

    planner = Planner("torch_dist", 1, thread_count=2)  # the default up to 0.16
    # From 0.17 on there are two strategies; the default one needs nvidia-resiliency-ext.
    options = {}
    if "async_strategy" in signature(planner.async_save).parameters:
        options["async_strategy"] = "mcore"
    return planner.async_save(sharded, directory, **options)


@contextmanager
def without_asking_for_apex() -> Iterator[None]:
    """Allow a model with fused weight gradients to be built without Apex. Transformer Engine's
    layers do not need it, but the constructor of the output layer demands it, although its product
    is computed elsewhere (``policy/output_layer.py``).
    """
    from megatron.core.tensor_parallel import layers

    with patch.object(layers, "_grad_accum_fusion_available", True):
        yield


def shard_id(part: ShardedTensor) -> object:
    """Return the name by which Megatron knows a shard of a tensor on all ranks that hold it."""
    from megatron.core.dist_checkpointing.exchange_utils import _sharded_tensor_shard_id

    return _sharded_tensor_shard_id(part)


def use_queue_of_this_process() -> None:
    """Give Megatron's writer of checkpoints a queue for its results, for which it would start a
    process otherwise.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


def main_param_and_states(part: DistributedOptimizer, parameter: Tensor) -> dict[str, Tensor]:
    """Return the main values and moments that Megatron's distributed optimizer ``part`` keeps for a
    parameter on this rank.
    """
    states: dict[str, Tensor] = part._get_main_param_and_optimizer_states(parameter)
    return states
