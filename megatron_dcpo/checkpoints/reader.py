"""Megatron's loader of checkpoints, changed so that it runs no code from the files and reads no
file twice.

torch reads ``.metadata``, and the objects stored with the tensors, with the full unpickler.
Importing this module replaces both for every load of this process: the metadata by
``conversion/checkpoint_metadata.py``, the objects by torch's restricted unpickler, which reads
tensors and ``common.pt`` anyway.

Files whose digest was checked are loaded from memory (``CHECKED``). If several ranks hold the same
weights, each reads a share, the one that it wrote if the layout is the same, and sends it to the
others.
"""

from __future__ import annotations

import io
import os
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
from torch.distributed.checkpoint.planner import ReadItem

from megatron_dcpo.conversion.checkpoint_metadata import read_metadata
from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.device import current_device
from megatron_dcpo.runtime.megatron_private import replace_checkpoint_reader, set_element, shard_id

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.exchange_utils import (
    determine_main_replica_uniform_distribution,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as strategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)

# The metadata are read before the load, whose errors would come with tracebacks. They are cached,
# because reading many chunks takes seconds.
metadata_of = lru_cache(maxsize=1)(read_metadata)

# the contents of files, from the check to the end of the load
CHECKED: dict[Path, bytes] = {}


class _CheckedFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        content = CHECKED.get(Path(path))
        if content is None:
            with super().create_stream(path, mode) as stream:
                yield stream
        else:
            with io.BytesIO(content) as stream:
                yield stream


class _Reader(CachedMetadataFileSystemReader):
    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.fs = _CheckedFiles()

    def read_metadata(self) -> Metadata:
        return metadata_of(Path(self.path))


class _LoadPlanner(strategy.MCoreLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, weights_only=True)
        name = read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _get_reader(checkpoint_dir: str | Path, *_: object, **__: object) -> _Reader:
    return _Reader(checkpoint_dir)


replace_checkpoint_reader(_get_reader, _LoadPlanner)


class SharedRead(strategy.TorchDistLoadShardedStrategy):
    """Lets each rank of ``replicas`` read a share of the tensors that all of them hold, and receive
    the shares of the others in place.
    """

    def __init__(self, replicas: dist.ProcessGroup) -> None:
        super().__init__()
        self.replicas = replicas

    @torch.no_grad()
    def load(self, sharded: dict[str, Any], directory: Path, *more: object) -> dict[str, Any]:
        # ``more``: since Megatron-core 0.17, async_strategy
        shares = determine_main_replica_uniform_distribution(
            sharded, self.replicas, ignore_groups=True
        )
        if shares is None:
            return super().load(sharded, directory, *more)
        parts = {_identity(part): part for part in nested_values(sharded)}
        reader_of = shares.main_rank_for_shard
        rank = dist.get_rank(self.replicas)
        to_read = {}
        for name, part in parts.items():
            if reader_of.get(name, rank) == rank:
                to_read[name] = part
        values = super().load(to_read, directory, *more)
        for name, reader in reader_of.items():
            if len(shares.all_ranks_for_shard[name]) == 1:
                continue
            if reader != rank and name in parts:
                parts[name].init_data(current_device())
                values[name] = parts[name].data
            if name in values:
                held = values[name]
            else:
                form = shares.shard_to_metadata[name]
                held = torch.empty(form.local_shape, dtype=form.dtype)
            moved = held.to(current_device()).contiguous()
            source = dist.get_global_rank(self.replicas, reader)
            dist.broadcast(moved, source, self.replicas)
            if moved is not held:
                held.copy_(moved)
        return dict_list_map_outplace(lambda part: values[_identity(part)], sharded)


def _identity(part: ShardedTensor | ShardedObject) -> object:
    if isinstance(part, ShardedTensor):
        return shard_id(part)
    return part.unique_key


def cause(error: BaseException) -> BaseException:
    """Return the error of a rank from the error that the collective load raises for it."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, 500)}"
