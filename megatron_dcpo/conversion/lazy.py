"""Tensors that are still on disk: which bytes of which files make up a tensor, and how to read a block of its rows.

Conversion never holds a model. It describes each output tensor as regions of input files (:class:`LazyTensor`) and moves
the bytes through one small buffer. Narrowing and concatenating such descriptions costs nothing.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_dcpo.errors import UserError

# safetensors' code of an element type -> (torch's name, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
ITEMSIZE = dict(DTYPES.values())
_READ_AHEAD = 8 * 2**20  # bytes asked of the disk before they are needed; its own default is a small part of it


@dataclass(frozen=True)
class Region:
    """A rectangle of a tensor seen as a matrix of bytes: ``rows`` x ``width`` at (``row``, ``column``).

    Its first byte is at ``offset`` of ``path``, its rows are ``stride`` bytes apart there. ``path`` ``None``: zeros.
    """

    row: int
    rows: int
    column: int
    width: int
    path: Path | None = None
    offset: int = 0
    stride: int = 0


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of ``shape`` whose bytes are ``rows`` x ``row_bytes``, covered once by ``regions`` in order of rows.

    ``dtype`` is torch's name (``bfloat16``). A vector is a matrix of one column, so that a vector of biases can be cut
    like the matrix it belongs to.
    """

    shape: tuple[int, ...]
    dtype: str
    rows: int
    row_bytes: int
    regions: tuple[Region, ...]

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    def narrow(self, start: int, stop: int) -> LazyTensor:
        """Rows ``start:stop`` of a vector or matrix."""
        parts = []
        for region in self.regions:
            first, last = max(start, region.row), min(stop, region.row + region.rows)
            if first < last:
                offset = region.offset + (first - region.row) * region.stride
                parts.append(replace(region, row=first - start, rows=last - first, offset=offset))
        return LazyTensor((stop - start, *self.shape[1:]), self.dtype, stop - start, self.row_bytes, tuple(parts))


def matrix_shape(shape: Sequence[int], dtype: str) -> tuple[int, int]:
    """(rows, bytes per row) of a tensor; a vector is a column, more dimensions are folded into the rows."""
    if len(shape) < 2:
        return math.prod(shape), ITEMSIZE[dtype]
    return math.prod(shape[:-1]), shape[-1] * ITEMSIZE[dtype]


def contiguous(shape: Sequence[int], dtype: str, path: Path | None, offset: int = 0) -> LazyTensor:
    """A tensor that lies in one piece at ``offset`` of ``path`` (or is all zeros)."""
    rows, row_bytes = matrix_shape(shape, dtype)
    return LazyTensor(tuple(shape), dtype, rows, row_bytes, (Region(0, rows, 0, row_bytes, path, offset, row_bytes),))


def concatenate(parts: Iterable[LazyTensor]) -> LazyTensor:
    """Stack vectors or matrices of equal width along dimension 0."""
    parts = list(parts)
    regions, rows = [], 0
    for part in parts:
        regions += [replace(region, row=region.row + rows) for region in part.regions]
        rows += part.rows
    head = parts[0]
    return LazyTensor((rows, *head.shape[1:]), head.dtype, rows, head.row_bytes, tuple(regions))


class Files(threading.local):
    """Open input files by path. Each thread opens its own: the kernel reads ahead per open file, not per thread."""

    def __init__(self, opened: list[int] | None = None) -> None:
        # threading.local calls this once per thread, with the arguments of the first call.
        self._opened = opened if opened is not None else []
        self._descriptors: dict[Path, int] = {}

    def read(self, path: Path, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset``. Raises :class:`UserError` when the file ends before."""
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            descriptor = self._descriptors[path] = _open(path)
            self._opened.append(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, offset + _READ_AHEAD, len(out), os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(out):
            count = os.preadv(descriptor, [out[done:]], offset + done)
            if count == 0:
                raise UserError(f"{path} is truncated: it ends before byte {offset + len(out)}")
            done += count


@contextmanager
def open_files() -> Iterator[Files]:
    """Input files for any number of threads; all are closed at the end."""
    opened: list[int] = []
    try:
        yield Files(opened)
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_rows(files: Files, tensor: LazyTensor, start: int, stop: int, out: memoryview) -> None:
    """Read rows ``start:stop`` of the tensor into ``out`` ((stop - start) * row_bytes bytes)."""
    matrix = np.frombuffer(out, np.uint8).reshape(stop - start, tensor.row_bytes)
    for region in tensor.regions:
        first, last = max(start, region.row), min(stop, region.row + region.rows)
        if first >= last:
            continue
        low, high = first - start, last - start
        if region.path is None:
            matrix[low:high, region.column : region.column + region.width] = 0
            continue
        offset = region.offset + (first - region.row) * region.stride
        if region.width == region.stride == tensor.row_bytes:
            files.read(region.path, offset, out[low * tensor.row_bytes : high * tensor.row_bytes])
            continue
        # A slice of the columns: its rows are narrower than ours (a tensor-parallel shard), or wider in the file.
        scratch = np.empty((last - first - 1) * region.stride + region.width, np.uint8)
        files.read(region.path, offset, scratch.data)
        source = np.lib.stride_tricks.as_strided(scratch, (last - first, region.width), (region.stride, 1))
        matrix[low:high, region.column : region.column + region.width] = source
