"""``.metadata`` of a ``torch.distributed.checkpoint``, read without running code that it names, for
conversion and resumption.

The file is a pickle, and unpickling calls whatever the file names. Here it may name the classes of
the metadata, which are built, and other classes of torch's and Megatron's checkpoints, for which an
empty object stands in; any other name is an error. The result is then compared with the directory,
so that no tensor lies outside its file or its shape.
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
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # a file of the directory itself


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
    except Exception as error:  # a pickle can make its reader raise anything
        reason = f"{type(error).__name__}: {one_line(error, 200)}"
        raise UserError(
            f"{path} is damaged ({reason}); restore the file or take another checkpoint"
        ) from None
    _check_files(directory, metadata)
    return metadata  # type: ignore[no-any-return]


def _check(metadata: object) -> None:
    """Check types and boxes. Raises :class:`ValueError`."""
    if not isinstance(metadata, Metadata):
        raise ValueError("not the metadata of a checkpoint")
    _require(isinstance(metadata.state_dict_metadata, dict), "no table of tensors")
    _require(isinstance(metadata.storage_data, dict), "no table of files")
    if not isinstance(getattr(metadata, "storage_meta", None), StorageMeta):
        metadata.storage_meta = StorageMeta()
    for key, entry in metadata.state_dict_metadata.items():
        _require(isinstance(key, str), "a tensor without a name")
        if not isinstance(entry, BytesStorageMetadata):
            _check_tensor(key, entry)
    for index, info in metadata.storage_data.items():
        _check_file_entry(index, info)


def _check_tensor(key: str, entry: object) -> None:
    if not isinstance(entry, TensorStorageMetadata):
        raise ValueError(f"{key:.80} is neither a tensor nor an object")
    _require(isinstance(entry.properties.dtype, torch.dtype), f"{key:.80} has no element type")
    shape = _counts(entry.size, key)
    _require(math.prod(shape) < 1 << 60, f"{key:.80} has an impossible shape")
    for chunk in entry.chunks:
        _require(isinstance(chunk, ChunkStorageMetadata), f"{key:.80} has an odd chunk")
        offsets = _counts(chunk.offsets, key)
        sizes = _counts(chunk.sizes, key)
        same_rank = len(offsets) == len(sizes) == len(shape)
        _require(same_rank, f"{key:.80} has a chunk outside its shape")
        for start, length, whole in zip(offsets, sizes, shape, strict=True):
            _require(start + length <= whole, f"{key:.80} has a chunk outside its shape")


def _check_file_entry(index: object, info: object) -> None:
    if not isinstance(index, MetadataIndex) or not isinstance(info, StorageInfo):
        raise ValueError("an odd entry of a file")
    _require(isinstance(index.fqn, str), "a tensor without a name")
    _counts(index.offset or (), index.fqn)
    name = info.relative_path
    plain = isinstance(name, str) and _PLAIN_NAME.fullmatch(name)
    _require(bool(plain), f"it names the file {name!r:.80}, which is not one of this directory")
    _counts((info.offset, info.length), name)
    transforms = getattr(info, "transform_descriptors", None)
    _require(not transforms, f"{name:.80} is transformed, which is not supported")


def _check_files(directory: Path, metadata: Metadata) -> None:
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
    for name, end in ends.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"cannot read {path}: {METADATA} names it, and it is not a file")
        if path.stat().st_size < end:
            raise UserError(f"{path} is truncated: {METADATA} promises {end} bytes")


def _counts(numbers: Iterable[object], name: str) -> tuple[int, ...]:
    """Return ``numbers`` if all of them are counts. Raises :class:`ValueError` naming their owner
    otherwise.
    """
    counts = []
    for number in numbers:
        if not (type(number) is int and 0 <= number < 1 << 62):
            raise ValueError(f"{name:.80} has a size that is not a count")
        counts.append(number)
    return tuple(counts)


def _require(good: bool, problem: str) -> None:
    if not good:
        raise ValueError(problem)


class _Opaque:
    """Stands in for objects that a checkpoint may carry besides its metadata (save plans) and that
    no reader needs.
    """

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


def _memory_format(owner: object, name: str) -> object:
    """Stand in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle a member of an enumeration.
    Metadata have one, the memory format.
    """
    if owner is MemoryFormat:
        return MemoryFormat[name]
    return _Opaque()


_CLASSES = (
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
_KNOWN: dict[tuple[str, str], object] = {
    **{(each.__module__, each.__qualname__): each for each in _CLASSES},
    ("builtins", "getattr"): _memory_format,
    ("__builtin__", "getattr"): _memory_format,  # its name in pickles of protocol 2
    ("torch.serialization", "_get_layout"): get_layout,
}
# Other classes of these packages are read as opaque objects. A writer's plans have paths.
_OPAQUE_PACKAGES = ("torch", "megatron", "pathlib")


class _MetadataUnpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    """Builds the known classes and nothing else.

    This is Python's own unpickler and not the C one, which allocates memory for whatever size a
    file gives an object, and which sets attributes of classes.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> object:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] in _OPAQUE_PACKAGES:
            return _Opaque
        raise pickle.UnpicklingError(f"it names {module}.{name}, which metadata have no use for")

    def load_build(self) -> None:
        if isinstance(self.stack[-2], type):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes a class")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
