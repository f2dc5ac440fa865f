"""Megatron's loader of checkpoints, which may have been written by others, without what would run code of theirs.

torch reads ``.metadata`` with the full unpickler, and the objects that lie beside the tensors as well. Importing this
replaces both for every load of this process: the metadata by ``conversion/checkpoint_metadata.py``, the objects by torch's
restricted unpickler. Tensors and ``common.pt`` are read by the latter anyway.
"""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata

from megatron_dcpo.conversion.checkpoint_metadata import read_metadata
from megatron_dcpo.errors import one_line

from megatron.core.dist_checkpointing.strategies import torch as strategy  # isort: skip
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader

# Read before the load, whose error would come with tracebacks, and not again by it: many chunks take seconds.
metadata_of = lru_cache(maxsize=1)(read_metadata)


class _Reader(CachedMetadataFileSystemReader):
    def read_metadata(self) -> Metadata:
        return metadata_of(Path(self.path))


class _LoadPlanner(strategy.MCoreLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        loaded, name = torch.load(value, weights_only=True), read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def _get_reader(checkpoint_dir: str | Path, cache_metadata: bool = False) -> _Reader:
    return _Reader(checkpoint_dir)


strategy._get_filesystem_reader = _get_reader
strategy.MCoreLoadPlanner = _LoadPlanner


def cause(error: BaseException) -> BaseException:
    """What a rank met, of the error that the collective load makes of it."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


def in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, 500)}"
