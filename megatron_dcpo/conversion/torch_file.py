"""The container of one tensor in a ``.distcp`` file: what ``torch.save`` writes, without holding the tensor.

``torch.save`` makes an uncompressed zip archive: a pickle that describes the tensor, its bytes, the byte order and a version
number. The parts around the bytes are small and known beforehand, all but the CRC-32; so the bytes can be streamed to
their place and the parts written around them at the end.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._utils

from megatron_dcpo.conversion.lazy import ITEMSIZE
from megatron_dcpo.errors import UserError

_STORAGES: dict[str, Any] = {
    "bool": torch.BoolStorage,
    "uint8": torch.ByteStorage,
    "int8": torch.CharStorage,
    "int16": torch.ShortStorage,
    "int32": torch.IntStorage,
    "int64": torch.LongStorage,
    "float16": torch.HalfStorage,
    "bfloat16": torch.BFloat16Storage,
    "float32": torch.FloatStorage,
    "float64": torch.DoubleStorage,
}
_STORAGE_DTYPES = {storage.__name__: dtype for dtype, storage in _STORAGES.items()}
_ALIGNMENT = 64  # torch aligns the bytes of a tensor to this within the archive
_VERSION = 0x031E, 20  # made by: Unix, zip 3.0; needed to extract: 2.0
_DOS_EPOCH = (1 << 5) | 1  # 1 January 1980


@dataclass(frozen=True)
class TensorFile:
    """Layout of an archive of ``length`` bytes that holds ``nbytes`` of tensor at ``data_offset``."""

    shape: tuple[int, ...]
    dtype: str
    data_offset: int
    nbytes: int
    length: int

    def around(self, crc: int) -> tuple[bytes, bytes]:
        """What stands before and after the tensor's bytes, given their CRC-32."""
        return _archive(self.shape, self.dtype, crc)


def tensor_file(shape: tuple[int, ...], dtype: str) -> TensorFile:
    """The layout for a tensor. ``dtype`` is torch's name; below 4 GiB, the limit of a plain zip archive."""
    before, after = _archive(shape, dtype, 0)
    nbytes = math.prod(shape) * ITEMSIZE[dtype]
    return TensorFile(shape, dtype, len(before), nbytes, len(before) + nbytes + len(after))


class _Stub:
    """Pickles as the tensor of the given shape whose bytes are the archive's record 0."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        no_hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
        return torch._utils._rebuild_tensor_v2, (_StorageStub(), 0, self.shape, strides, False, no_hooks)


class _StorageStub:
    pass


def _description(shape: tuple[int, ...], dtype: str) -> bytes:
    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, _StorageStub):
                return ("storage", _STORAGES[dtype], "0", "cpu", math.prod(shape))
            return None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(_Stub(shape))
    return buffer.getvalue()


def _archive(shape: tuple[int, ...], dtype: str, crc: int) -> tuple[bytes, bytes]:
    nbytes = math.prod(shape) * ITEMSIZE[dtype]
    before = bytearray()
    directory = bytearray()

    def entry(body: bytearray, start: int, name: bytes, data: bytes | None, align: int = 1) -> None:
        size, checksum = (nbytes, crc) if data is None else (len(data), zlib.crc32(data))
        offset = start + len(body)
        padding = -(offset + 30 + len(name) + 4) % align if align > 1 else 0
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding if align > 1 else b""
        fields = struct.pack("<HHHHIIIHH", 0, 0, 0, _DOS_EPOCH, checksum, size, size, len(name), len(extra))
        body += b"PK\x03\x04" + struct.pack("<H", _VERSION[1]) + fields + name + extra + (data or b"")
        fields = struct.pack(
            "<HHHHIIIHHHHHII", 0, 0, 0, _DOS_EPOCH, checksum, size, size, len(name), 0, 0, 0, 0, 0, offset
        )
        directory.extend(b"PK\x01\x02" + struct.pack("<HH", *_VERSION) + fields + name)

    entry(before, 0, b"archive/data.pkl", _description(shape, dtype))
    entry(before, 0, b"archive/byteorder", b"little")
    entry(before, 0, b"archive/data/0", None, _ALIGNMENT)
    after = bytearray()
    entry(after, len(before) + nbytes, b"archive/version", b"3\n")
    start = len(before) + nbytes + len(after)
    after += directory
    after += b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 4, 4, len(directory), start, 0)
    return bytes(before), bytes(after)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor found in an archive: its bytes begin at ``offset`` of the file; ``stride`` in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def find_tensor(path: Path, offset: int, length: int) -> StoredTensor:
    """Locate the tensor that ``torch.save`` wrote at ``offset`` of ``path``; its bytes are not read.

    Raises :class:`UserError` when there is no such archive.
    """
    try:
        with path.open("rb") as file:
            window = _Window(file, offset, length)
            archive = zipfile.ZipFile(window)
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            dtype, key, start, shape, stride = _Unpickler(io.BytesIO(archive.read(records["data.pkl"]))).load()
            record = records[f"data/{key}"]
            if record.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"{path}: a compressed tensor; not written by torch.save")
            window.seek(record.header_offset)
            names, extras = struct.unpack("<HH", window.read(30)[26:30])
            data = offset + record.header_offset + 30 + names + extras
            last = start + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 0
            if last * ITEMSIZE[dtype] > record.file_size:
                raise UserError(f"{path}: the tensor at byte {offset} is larger than its storage")
            return StoredTensor(dtype, tuple(shape), tuple(stride), data + start * ITEMSIZE[dtype])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (
        zipfile.BadZipFile,
        pickle.UnpicklingError,
        KeyError,
        ValueError,
        TypeError,
        EOFError,
        struct.error,
    ) as error:
        raise UserError(f"{path} is truncated or damaged at byte {offset} ({type(error).__name__}: {error})") from None


class _Unpickler(pickle.Unpickler):
    """Reads the description of a tensor, and nothing else: a checkpoint must not be able to run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, start, shape, stride, *_: (*storage, start, shape, stride)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if name in _STORAGE_DTYPES and module in ("torch", "torch.storage"):
            return _STORAGE_DTYPES[name]
        raise pickle.UnpicklingError(f"unexpected {module}.{name} in the description of a tensor")

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, _ = pid
        return dtype, key


class _Window(io.RawIOBase):
    """``length`` bytes of a file as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        remaining = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data: bytes = self._file.read(remaining if size < 0 else min(size, remaining))
        self._at += len(data)
        return data
