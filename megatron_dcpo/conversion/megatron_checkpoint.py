"""Megatron's ``torch_dist`` checkpoints without Megatron: read as memory maps, written one tensor
at a time.

The format is that of ``torch.distributed.checkpoint``: ``.metadata`` (a pickle with shape and type
of every tensor, its chunks, and the place of each chunk), ``*.distcp`` (the chunks, each an archive
of ``torch.save``), and Megatron's ``common.pt`` and ``metadata.json``. Tensors are read as bytes,
``uint8`` of shape [*shape, bytes per element], because they are not aligned in the files.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_dcpo.conversion.checkpoint_metadata import METADATA, read_metadata
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import dtype_bytes, name_of, torch_dtype
from megatron_dcpo.runtime.megatron_private import ArchiveReader, create_file_view
from megatron_dcpo.runtime.text import read_json_object

LATEST = "latest_checkpointed_iteration.txt"
BEST = "best.json"  # iteration, metric and value of the checkpoint that training.keep_best keeps
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as ``uint8`` [*shape, bytes per element], sharing its memory."""
    flat = tensor.reshape(-1).view(torch.uint8)
    return flat.view(*tensor.shape, tensor.element_size())


# ------------------------------------------------------------------------------------------ reading


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor at ``offsets`` with ``sizes``, stored as an archive of ``length`` bytes at
    ``start``.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint in any number of chunks. ``dtype`` is torch's name.

    If the tensor is one entry of a stacked tensor, ``index`` is its position along the leading axes
    of the ``chunks``.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    index: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)

    def entry(self, number: int) -> StoredTensor:
        """Return entry ``number`` along the leading axis. Megatron stacks the layers on the first
        axis and the experts on the second.
        """
        axis = len(self.index)
        chunks = []
        for chunk in self.chunks:
            start = chunk.offsets[axis]
            if start <= number < start + chunk.sizes[axis]:
                chunks.append(chunk)
        return StoredTensor(
            key=self.key,
            shape=self.shape[1:],
            dtype=self.dtype,
            chunks=tuple(chunks),
            index=(*self.index, number),
        )

    def append(self, below: StoredTensor) -> StoredTensor:
        """Return this tensor with the rows of ``below`` after its last row."""
        rows = self.shape[0]
        chunks = list(self.chunks)
        for chunk in below.chunks:
            offsets = (chunk.offsets[0] + rows, *chunk.offsets[1:])
            chunks.append(replace(chunk, offsets=offsets))
        shape = (rows + below.shape[0], *self.shape[1:])
        return replace(self, shape=shape, chunks=tuple(chunks))


class MegatronCheckpoint:
    """The tensors of the checkpoint at ``path`` by their key. Raises :class:`UserError` if it is
    damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: dict[Path, Tensor] = {}
        self.tensors = self._tensors(read_metadata(path))

    def _tensors(self, metadata: Metadata) -> dict[str, StoredTensor]:
        storage = {}
        for index, info in metadata.storage_data.items():
            storage[index.fqn, tuple(index.offset or ())] = info
        tensors = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                continue
            chunks = []
            for chunk in entry.chunks:
                info = storage.get((key, tuple(chunk.offsets)))
                if info is None:
                    raise UserError(
                        f"{self.path / METADATA} is damaged: a chunk of {key} lies in no file"
                    )
                chunks.append(
                    Chunk(
                        offsets=tuple(chunk.offsets),
                        sizes=tuple(chunk.sizes),
                        path=self.path / info.relative_path,
                        start=info.offset,
                        length=info.length,
                    )
                )
            tensors[key] = StoredTensor(
                key=key,
                shape=tuple(entry.size),
                dtype=name_of(entry.properties.dtype),
                chunks=tuple(chunks),
            )
        return tensors

    def blocks(self, tensor: StoredTensor) -> list[tuple[int, Tensor]]:
        """Return pairs of a first row and bytes [rows, ..., bytes per element] of ``tensor``, in
        order of rows; no row is in two blocks.

        Chunks of whole rows are views of the mapped files; chunks of columns are joined. Raises
        :class:`UserError` for a chunk that is damaged or contradicts the metadata.
        """
        boxes = []
        for chunk in tensor.chunks:
            block = self._map(tensor, chunk)
            offsets = chunk.offsets
            for number in tensor.index:
                block = block[number - offsets[0]]
                offsets = offsets[1:]
            boxes.append((offsets, block))
        if sum(block.numel() for _, block in boxes) != tensor.nbytes:
            raise UserError(f"{self.path}: the chunks of {tensor.key} do not cover it")
        if not tensor.shape:
            return [(0, block) for _, block in boxes]
        columns_of: dict[int, list[Tensor]] = {}  # by first row
        for offsets, block in sorted(boxes, key=lambda box: box[0]):
            columns_of.setdefault(offsets[0], []).append(block)
        blocks = []
        for start, columns in columns_of.items():
            if len(columns) == 1:
                blocks.append((start, columns[0]))
            else:
                blocks.append((start, torch.cat(columns, dim=1)))
        return blocks

    def _map(self, tensor: StoredTensor, chunk: Chunk) -> Tensor:
        """Return the bytes of a chunk as a view of its mapped file."""
        try:
            if chunk.path not in self._maps:
                self._maps[chunk.path] = torch.from_numpy(np.memmap(chunk.path, np.uint8, "c"))
            stored, start = _locate_in_archive(chunk)
        except OSError as error:
            raise UserError(f"cannot read {chunk.path}: {error.strerror or error}") from None
        except Exception as error:  # unpickler, archive reader and file view may raise anything
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise UserError(
                f"{chunk.path} is truncated or damaged at byte {chunk.start} ({reason})"
            ) from None
        if stored.dtype != torch_dtype(tensor.dtype) or stored.numel() != math.prod(chunk.sizes):
            raise UserError(f"{chunk.path}: a chunk of {tensor.key} is not what {METADATA} says")
        if not stored.is_contiguous():
            raise UserError(
                f"{chunk.path}: a chunk of {tensor.key} is stored transposed, which is not "
                "supported"
            )
        nbytes = math.prod(chunk.sizes) * dtype_bytes(tensor.dtype)
        if start + nbytes > chunk.length:
            raise UserError(
                f"{chunk.path}: the tensor at byte {chunk.start} is larger than its storage"
            )
        first = chunk.start + start
        flat = self._maps[chunk.path][first : first + nbytes]
        return flat.view(*chunk.sizes, dtype_bytes(tensor.dtype))


def _locate_in_archive(chunk: Chunk) -> tuple[Tensor, int]:
    """Return the stored tensor without its values, and the byte of the archive at which they begin.
    Never runs code from the file.
    """
    with chunk.path.open("rb") as file, torch.serialization.skip_data():
        archive = cast(IO[bytes], create_file_view(file, chunk.start, chunk.length))
        stored = torch.load(archive, map_location="cpu", weights_only=True)
        archive.seek(0)
        reader = ArchiveReader(archive)
        start = reader.get_record_offset("data/0")
    return stored, start + stored.storage_offset() * stored.element_size()


def find_checkpoint(path: Path, which: str = "latest") -> Path:
    """Return ``path`` if it is a checkpoint. If it is the directory of a training's checkpoints,
    return the ``latest`` one, which its ``latest_checkpointed_iteration.txt`` names, or the
    ``best`` one, which its ``best.json`` names. Raises :class:`UserError` if there is none.
    """
    if which == "best":
        path = path / f"iter_{_best_iteration(path):07d}"
    tracker = path / LATEST
    if not (path / METADATA).is_file() and tracker.is_file():
        text = tracker.read_text(errors="replace").strip()
        if not re.fullmatch(r"[0-9]{1,18}|[A-Za-z0-9_-]+", text):
            raise UserError(f"{tracker} is damaged: it names {text!r:.80} and not an iteration")
        name = text
        if text.isdigit():
            name = f"iter_{int(text):07d}"
        path = path / name
    if not path.is_dir():
        raise UserError(f"checkpoint directory {path} does not exist")
    if not (path / METADATA).is_file():
        raise UserError(f"{path} is not a torch_dist checkpoint: {METADATA} is missing")
    return path


def _best_iteration(path: Path) -> int:
    if not (path / BEST).is_file():
        raise UserError(
            f"{path} has no {BEST}, which names the best checkpoint of a training with "
            "training.keep_best"
        )
    best = read_json_object(path / BEST).get("iteration")
    if type(best) is not int:
        raise UserError(f"{path / BEST} is damaged: it names {best!r:.80} and not an iteration")
    return best


# ------------------------------------------------------------------------------------------ writing


@dataclass(frozen=True)
class NewChunk:
    """A box at ``offsets`` with ``sizes`` of the tensor ``key`` of ``shape``. ``make`` returns its
    values when it is written.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    make: Callable[[], Tensor]

    def item(self) -> WriteItem:
        box = ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))
        data = TensorWriteData(
            chunk=box,
            properties=TensorProperties(dtype=torch_dtype(self.dtype)),
            size=torch.Size(self.shape),
        )
        return WriteItem(
            index=MetadataIndex(self.key, self.offsets), type=WriteItemType.SHARD, tensor_data=data
        )


class _ChunkPlanner(DefaultSavePlanner):
    """Makes each tensor only when it is written, so that only one chunk is in memory at a time."""

    def __init__(
        self,
        chunks: Sequence[NewChunk],
        objects: Mapping[str, object],
        count: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._chunks = {(chunk.key, chunk.offsets): chunk for chunk in chunks}
        self._objects = objects
        self._count = count

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save([self._objects[write_item.index.fqn]], buffer)
            return buffer
        assert write_item.index.offset is not None
        tensor = self._chunks[write_item.index.fqn, tuple(write_item.index.offset)].make()
        self._count(tensor.nbytes)
        return tensor


class _Writer(FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        # Without the directory's temporary name and a random number: equal inputs give equal files.
        return StorageMeta()


def write_checkpoint(
    directory: Path,
    chunks: Sequence[NewChunk],
    objects: Mapping[str, object],
    count: Callable[[int], None],
) -> None:
    """Write a checkpoint with the tensors of ``chunks`` and the small ``objects`` that Megatron
    keeps with them.

    ``count`` is called with the bytes of each chunk. There is one thread, because a failure in
    another thread of torch's writer is lost. Raises :class:`OSError` if the disk refuses.
    """
    items = [chunk.item() for chunk in chunks]
    items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects]
    # no copying ahead: if torch sees a GPU, it would hold many tensors
    writer = _Writer(directory, sync_files=False, thread_count=1, per_thread_copy_ahead=0)
    plans, metadata = create_default_global_save_plan([SavePlan(items)])
    planner = _ChunkPlanner(chunks, objects, count)
    checksums = torch.serialization.get_crc32_options()
    try:
        # They take half of torch.save's time, and no reader compares them.
        torch.serialization.set_crc32_options(False)
        results = writer.write_data(writer.prepare_global_plan(plans)[0], planner).value()
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__context__
        raise cause or error from None
    finally:
        torch.serialization.set_crc32_options(checksums)
    torch.save({}, directory / "common.pt")
    (directory / "metadata.json").write_text(json.dumps(CONFIG))
    writer.finish(metadata, [results])
