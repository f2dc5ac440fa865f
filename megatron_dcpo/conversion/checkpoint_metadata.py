"""``.metadata`` of a ``torch.distributed.checkpoint``, read without running what it says: for
conversion and resumption.

The file is a pickle, and unpickling calls whatever the file names. Here it may name the classes of
the metadata, which are built, and other classes of torch's and Megatron's checkpoints, in whose
place stands an empty object; any other name is an error. What is read is then held against the
directory, so that no tensor lies outside its file or its shape.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.megatron_private import MemoryFormat, StorageInfo, get_layout

METADATA = ".metadata"
_MOST_BYTES = 4 << 30
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # of a file in the directory itself


def read_metadata(directory: Path) -> Metadata:
    """Return the metadata of the checkpoint in ``directory``, checked. Raises :class:`UserError`
    naming the file.
    """
    path = directory / METADATA
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 30} GB")
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        _check(metadata)
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename or path}: {error.strerror or error}"
        ) from None
    except (
        MemoryError,
        RecursionError,
        Exception,
    ) as error:  # a pickle can make its reader raise anything
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise UserError(
            f"{path} is damaged ({reason}); restore the file or take another checkpoint"
        ) from None
    _check_files(directory, metadata)
    return metadata  # type: ignore[no-any-return]


def _check(metadata: Any) -> None:
    """Check types and boxes. Raises :class:`ValueError`."""
    _require(isinstance(metadata, Metadata), "not the metadata of a checkpoint")
    _require(isinstance(metadata.state_dict_metadata, dict), "no table of tensors")
    _require(isinstance(metadata.storage_data, dict), "no table of files")
    if not isinstance(getattr(metadata, "storage_meta", None), StorageMeta):
        metadata.storage_meta = StorageMeta()
    for key, entry in metadata.state_dict_metadata.items():
        _require(isinstance(key, str), "a tensor without a name")
        if isinstance(entry, BytesStorageMetadata):
            continue
        _require(
            isinstance(entry, TensorStorageMetadata), f"{key:.80} is neither a tensor nor an object"
        )
        _require(isinstance(entry.properties.dtype, torch.dtype), f"{key:.80} has no element type")
        size = _whole(entry.size, key)
        _require(math.prod(size) < 1 << 60, f"{key:.80} has an impossible shape")
        for chunk in entry.chunks:
            _require(isinstance(chunk, ChunkStorageMetadata), f"{key:.80} has an odd chunk")
            offsets = _whole(chunk.offsets, key)
            sizes = _whole(chunk.sizes, key)
            inside = len(offsets) == len(sizes) == len(size) and all(
                start + length <= whole
                for start, length, whole in zip(offsets, sizes, size, strict=True)
            )
            _require(inside, f"{key:.80} has a chunk outside its shape")
    for index, info in metadata.storage_data.items():
        _require(
            isinstance(index, MetadataIndex) and isinstance(info, StorageInfo),
            "an odd entry of a file",
        )
        _require(isinstance(index.fqn, str), "a tensor without a name")
        _whole(index.offset or (), index.fqn)
        name = info.relative_path
        plain = isinstance(name, str) and _PLAIN_NAME.fullmatch(name)
        _require(bool(plain), f"it names the file {name!r:.80}, which is not one of this directory")
        _whole((info.offset, info.length), name)
        _require(
            not getattr(info, "transform_descriptors", None),
            f"{name:.80} is transformed, which is not supported",
        )


def _check_files(directory: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"cannot read {path}: {METADATA} names it, and it is not a file")
        if path.stat().st_size < end:
            raise UserError(f"{path} is truncated: {METADATA} promises {end} bytes")


def _whole(numbers: Iterable[Any], name: Any) -> tuple[int, ...]:
    values = tuple(numbers)
    _require(
        all(type(n) is int and 0 <= n < 1 << 62 for n in values),
        f"{name:.80} has a size that is not a count",
    )
    return values


def _require(good: bool, problem: str) -> None:
    if not good:
        raise ValueError(problem)


class _Opaque:
    """Stands for what a checkpoint may carry besides its metadata (save plans), which is not
    needed.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _memory_format(owner: Any, name: str) -> Any:
    """Return ``getattr`` as Python 3.11.0 to 3.11.3 pickles a member of an enumeration, for the one
    that metadata has.
    """
    return MemoryFormat[name] if owner is MemoryFormat else _Opaque()


_KNOWN: dict[tuple[str, str], Any] = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        StorageInfo,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        MemoryFormat,
        OrderedDict,
        torch.Size,
    )
} | {
    ("builtins", "getattr"): _memory_format,
    ("torch.serialization", "_get_layout"): get_layout,
}


class _MetadataUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Builds the known classes and nothing else.

    Python's own unpickler, not the one in C: that one makes room for whatever number a file gives
    to an object, and sets attributes of classes.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in (
            "torch",
            "megatron",
            "pathlib",
        ):  # the last: where it was written
            return _Opaque
        raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata have no use for")

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
