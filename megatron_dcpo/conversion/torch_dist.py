"""Megatron's ``torch_dist`` checkpoints without Megatron: what is in them, and how to write one from streams.

The format is that of ``torch.distributed.checkpoint``: ``.metadata`` (a pickle: shape and type of every tensor, its chunks,
and where each chunk lies), ``*.distcp`` (the chunks, each an archive of ``torch.save``), and from Megatron ``common.pt`` and
``metadata.json``.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_dcpo.conversion.lazy import ITEMSIZE, LazyTensor, Region, matrix_shape
from megatron_dcpo.conversion.torch_file import find_tensor, tensor_file
from megatron_dcpo.conversion.transfer import Output, Stream
from megatron_dcpo.errors import UserError

LATEST = "latest_checkpointed_iteration.txt"
METADATA = ".metadata"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


# ---------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor at ``offsets`` with ``sizes``, stored as an archive of ``length`` bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensors:
    """A tensor of the checkpoint, of whatever number of chunks. ``dtype`` is torch's name."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]

    def whole(self) -> LazyTensor:
        """The tensor, de-sharded."""
        return self._lazy(self.shape, self.chunks, leading=0)

    def layer(self, number: int) -> LazyTensor:
        """Entry ``number`` along the leading axis, on which Megatron stacks the layers."""
        chunks = tuple(c for c in self.chunks if c.offsets[0] <= number < c.offsets[0] + c.sizes[0])
        return self._lazy(self.shape[1:], chunks, leading=1, number=number)

    def _lazy(self, shape: tuple[int, ...], chunks: Sequence[Chunk], leading: int, number: int = 0) -> LazyTensor:
        rows, row_bytes = matrix_shape(shape, self.dtype)
        regions = sorted(
            (r for chunk in chunks for r in self._regions(shape, chunk, leading, number)),
            key=lambda region: (region.row, region.column),
        )
        if sum(region.rows * region.width for region in regions) != rows * row_bytes:
            raise UserError(
                f"{chunks[0].path.parent if chunks else METADATA}: the chunks of {self.key} do not cover it"
            )
        return LazyTensor(shape, self.dtype, rows, row_bytes, tuple(regions))

    def _regions(self, shape: tuple[int, ...], chunk: Chunk, leading: int, number: int) -> Iterator[Region]:
        stored = find_tensor(chunk.path, chunk.start, chunk.length)
        if stored.dtype != self.dtype or math.prod(stored.shape) != math.prod(chunk.sizes):
            raise UserError(f"{chunk.path}: a chunk of {self.key} is not what {METADATA} says")
        if not _is_contiguous(stored.shape, stored.stride):
            raise UserError(f"{chunk.path}: a chunk of {self.key} is stored transposed, which is not supported")
        offsets, sizes, start = chunk.offsets[leading:], chunk.sizes[leading:], stored.offset
        itemsize = ITEMSIZE[self.dtype]
        if leading:
            start += (number - chunk.offsets[0]) * math.prod(sizes) * itemsize
        if len(shape) < 2:
            yield Region(offsets[0] if offsets else 0, math.prod(sizes), 0, itemsize, chunk.path, start, itemsize)
            return
        width = sizes[-1] * itemsize
        for at in itertools.product(*(range(n) for n in sizes[:-2])):
            row = 0
            for axis, n in enumerate(shape[:-1]):
                row = row * n + offsets[axis] + (at[axis] if axis < len(at) else 0)
            yield Region(row, sizes[-2], offsets[-1] * itemsize, width, chunk.path, start, width)
            start += sizes[-2] * width


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and step != expected:
            return False
        expected *= n
    return True


def find_checkpoint(path: Path) -> Path:
    """``path`` itself, or the checkpoint that its ``latest_checkpointed_iteration.txt`` names."""
    tracker = path / LATEST
    if not (path / METADATA).is_file() and tracker.is_file():
        text = tracker.read_text().strip()
        path = path / (f"iter_{int(text):07d}" if text.isdigit() else text)
    if not path.is_dir():
        raise UserError(f"checkpoint directory {path} does not exist")
    if not (path / METADATA).is_file():
        raise UserError(f"{path} is not a torch_dist checkpoint: {METADATA} is missing")
    return path


def is_checkpoint(path: Path) -> bool:
    return (path / METADATA).is_file() or (path / LATEST).is_file()


def read_checkpoint(path: Path) -> dict[str, StoredTensors]:
    """Every tensor of the checkpoint by its key. Raises :class:`UserError` when metadata and files disagree."""
    try:
        with (path / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        _check_sizes(path, metadata.storage_data.values())
        storage = {(index.fqn, tuple(index.offset or ())): info for index, info in metadata.storage_data.items()}
        tensors = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            chunks = []
            for chunk in entry.chunks:
                info = storage[key, tuple(chunk.offsets)]
                place = path / info.relative_path
                chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), place, info.offset, info.length))
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[key] = StoredTensors(key, tuple(entry.size), dtype, tuple(chunks))
        return tensors
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    except (pickle.UnpicklingError, EOFError, KeyError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{path / METADATA} is damaged ({type(error).__name__}: {error})") from None


_KNOWN = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
        _StorageInfo,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
        torch.Size,
    )
}


def _check_sizes(path: Path, places: Iterable[Any]) -> None:
    ends: dict[str, int] = {}
    for info in places:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        if (path / name).stat().st_size < end:
            raise UserError(f"{path / name} is truncated: {METADATA} promises {end} bytes")


class _Opaque:
    """Stands for what a checkpoint may carry besides its metadata (save plans), which is not needed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _memory_format(owner: Any, name: str) -> Any:
    """``getattr`` as Python 3.11.0 to 3.11.3 pickles a member of an enumeration, for the one that metadata has."""
    return _MEM_FORMAT_ENCODING[name] if owner is _MEM_FORMAT_ENCODING else _Opaque()


class _MetadataUnpickler(pickle.Unpickler):
    """Builds the known classes and nothing else: a checkpoint must not be able to run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if (module, name) in (
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
        ):
            return super().find_class(module, name)
        return _Opaque


# ---------------------------------------------------------------------------------------------------------- writing


@dataclass
class CheckpointWriter:
    """Plans the files of a checkpoint: give it tensors, run the :attr:`streams`, then :meth:`finish`.

    Chunks go to two files, as with Megatron's own writer, so that two threads do not wait for one file.
    """

    directory: Path
    streams: list[Stream] = field(default_factory=list)
    _metadata: dict[str, Any] = field(default_factory=dict)
    _storage: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)
    _sizes: list[int] = field(default_factory=lambda: [0, 0])
    _objects: list[tuple[int, int, bytes]] = field(default_factory=list)

    def add(
        self,
        key: str,
        layer: tuple[int, int] | None,
        parts: Sequence[tuple[str, LazyTensor]],
        bounds: Sequence[int],
    ) -> None:
        """A tensor made of ``parts`` (hashed by name), cut into chunks at the row numbers ``bounds`` (first 0, last all).

        ``layer`` is (number, count) for a tensor that is stacked with those of the other layers.
        """
        dtype, columns, row_bytes = parts[0][1].dtype, parts[0][1].shape[1:], parts[0][1].row_bytes
        number = self._sizes.index(min(self._sizes))
        outputs = []
        for start, stop in itertools.pairwise(bounds):
            offsets, sizes = (start, *(0 for _ in columns)), (stop - start, *columns)
            if layer is not None:
                offsets, sizes = (layer[0], *offsets), (1, *sizes)
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            self._entry(key, layer, (bounds[-1], *columns), dtype).chunks.append(chunk)
            archive = tensor_file(sizes, dtype)
            place = self._place(MetadataIndex(key, offsets), number, archive.length)
            assert archive.nbytes == (stop - start) * row_bytes

            def finish(crc: int, place: int = place, archive: Any = archive) -> list[tuple[int, bytes]]:
                before, after = archive.around(crc)
                return [(place, before), (place + archive.data_offset + archive.nbytes, after)]

            outputs.append(Output(self._path(number), place + archive.data_offset, archive.nbytes, finish))
        self.streams.append(Stream(tuple(parts), tuple(outputs)))

    def add_object(self, key: str, value: Any) -> None:
        """A small object that Megatron keeps beside the tensors (the extra state of a module)."""
        buffer = io.BytesIO()
        torch.save([value], buffer)
        data = buffer.getvalue()
        self._metadata[key] = BytesStorageMetadata()
        self._objects.append((0, self._place(MetadataIndex(key), 0, len(data)), data))

    @property
    def nbytes(self) -> int:
        return sum(self._sizes)

    def create_files(self) -> None:
        """Empty files of the final size, and the small objects in them."""
        for number, size in enumerate(self._sizes):
            with self._path(number).open("wb") as file:
                file.truncate(size)
                for owner, place, data in self._objects:
                    if owner == number:
                        file.seek(place)
                        file.write(data)

    def finish(self) -> None:
        """Write what makes the directory a checkpoint."""
        metadata = Metadata(self._metadata, planner_data=None, storage_data=self._storage, storage_meta=StorageMeta())
        torch.save({}, self.directory / "common.pt")
        (self.directory / "metadata.json").write_text(json.dumps(CONFIG))
        with (self.directory / METADATA).open("wb") as file:
            pickle.dump(metadata, file)

    def _path(self, number: int) -> Path:
        return self.directory / f"__0_{number}.distcp"

    def _place(self, index: MetadataIndex, number: int, length: int) -> int:
        offset = self._sizes[number]
        self._storage[index] = _StorageInfo(f"__0_{number}.distcp", offset, length)
        self._sizes[number] = offset + length
        return offset

    def _entry(self, key: str, layer: tuple[int, int] | None, shape: tuple[int, ...], dtype: str) -> Any:
        if key not in self._metadata:
            size = shape if layer is None else (layer[1], *shape)
            properties = TensorProperties(dtype=getattr(torch, dtype))
            self._metadata[key] = TensorStorageMetadata(properties, torch.Size(size), [])
        return self._metadata[key]


def model_tensors(tensors: Mapping[str, StoredTensors], path: Path) -> tuple[str, dict[str, StoredTensors]]:
    """(prefix, tensors) of the language model in a checkpoint that may hold an optimizer too.

    Wrappers put ``module.`` or ``model.`` before the names. Raises :class:`UserError` when there is no model.
    """
    marker = "embedding.word_embeddings.weight"
    prefixes = {key.removesuffix(marker) for key in tensors if key.endswith(marker)}
    prefixes = {prefix for prefix in prefixes if set(prefix.split(".")) <= {"", "model", "module"}}
    if len(prefixes) != 1:
        found = f"{len(prefixes)} models" if prefixes else "no GPT model"
        raise UserError(f"{path}: {found} in the checkpoint (looked for {marker})")
    prefix = prefixes.pop()
    rooms = tuple(prefix + room for room in ("embedding.", "decoder.", "output_layer."))
    return prefix, {key: tensor for key, tensor in tensors.items() if key.startswith(rooms)}
