"""Megatron's loader of checkpoints: without what would run code of those who wrote them, and
without reading twice.

torch reads ``.metadata`` with the full unpickler, and the objects that lie beside the tensors as
well. Importing this replaces both for every load of this process: the metadata by
``conversion/checkpoint_metadata.py``, the objects by torch's restricted unpickler. Tensors and
``common.pt`` are read by the latter anyway.

Files whose digest was checked are loaded from what was read for it (``CHECKED``); of weights that
several ranks hold, each reads a share, the one that it wrote where the layout is the same, and
sends it to the others.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata

from megatron_dcpo.conversion.checkpoint_metadata import read_metadata
from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.megatron_private import replace_checkpoint_reader, set_element, shard_id

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.strategies import torch as strategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)

# Read before the load, whose error would come with tracebacks, and not again by it: many chunks
# take seconds.
metadata_of = lru_cache(maxsize=1)(read_metadata)


# Files in memory, from the check to the end of the load
CHECKED: dict[Path, bytes] = {}


class _CheckedFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        content = CHECKED.get(Path(path))
        with (
            super().create_stream(path, mode) if content is None else io.BytesIO(content) as stream
        ):
            yield stream


class _Reader(CachedMetadataFileSystemReader):
    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.fs = _CheckedFiles()

    def read_metadata(self) -> Metadata:
        return metadata_of(Path(self.path))


class _LoadPlanner(strategy.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _get_reader(checkpoint_dir: str | Path, *_: Any, **__: Any) -> _Reader:
    return _Reader(checkpoint_dir)


replace_checkpoint_reader(_get_reader, _LoadPlanner)


class SharedRead(strategy.TorchDistLoadShardedStrategy):
    """Ranks of ``replicas`` read a share each of what all of them hold, and receive the others'
    shares in place.
    """

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        super().__init__()
        self.replicas = replicas

    @torch.no_grad()
    def load(
        self, sharded: Any, directory: Path, *more: Any
    ) -> Any:  # from 0.17 on: async_strategy
        shares = determine_main_replica_uniform_distribution(
            sharded, self.replicas, ignore_groups=True
        )
        if shares is None:
            return super().load(sharded, directory, *more)
        parts = {_identity(part): part for part in nested_values(sharded)}
        reader = shares.main_rank_for_shard
        own = dist.get_rank(self.replicas)
        own_parts = {name: part for name, part in parts.items() if reader.get(name, own) == own}
        values = super().load(own_parts, directory, *more)
        for name, rank in reader.items():
            if len(shares.all_ranks_for_shard[name]) == 1:
                continue
            if rank != own and name in parts:
                parts[name].init_data(current_device())
                values[name] = parts[name].data
            form = shares.shard_to_metadata[name]
            if name in values:
                held = values[name]
            else:
                held = torch.empty(form.local_shape, dtype=form.dtype)
            moved = held.to(current_device()).contiguous()
            dist.broadcast(moved, dist.get_global_rank(self.replicas, rank), self.replicas)
            if moved is not held:
                held.copy_(moved)
        return dict_list_map_outplace(lambda part: values[_identity(part)], sharded)


def _identity(part: Any) -> Any:
    if isinstance(part, ShardedTensor):
        return shard_id(part)
    return part.unique_key


def cause(error: BaseException) -> BaseException:
    """Return what a rank met, of the error that the collective load makes of it."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, 500)}"
