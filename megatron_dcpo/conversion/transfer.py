"""The executor of a conversion: streams of bytes from lazily read tensors to places in output files.

Every thread owns one buffer of :data:`BLOCK` bytes; a block is read, hashed, summed and written while it is in the
processor's cache. Nothing else is held, so memory does not depend on the size of the model.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dcpo.conversion.lazy import Files, LazyTensor, read_rows

BLOCK = 2**20
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Output:
    """``nbytes`` of a stream belong at ``offset`` of ``path``.

    ``finish`` gets their CRC-32 and returns what must be written around them: (offset in the file, bytes) pairs.
    """

    path: Path
    offset: int
    nbytes: int
    finish: Callable[[int], Sequence[tuple[int, bytes]]] | None = None


@dataclass(frozen=True)
class Stream:
    """The bytes of ``parts`` one after the other, cut into ``outputs`` (none: they are only hashed).

    A part is (name, tensor); parts of one name are slices of one tensor, in order. An empty name is not hashed.
    """

    parts: tuple[tuple[str, LazyTensor], ...]
    outputs: tuple[Output, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, part in self.parts)


def transfer(files: Files, streams: Sequence[Stream], progress: Progress = lambda nbytes: None) -> dict[str, str]:
    """Run the streams; returns the SHA-256 of every named tensor. Output files must exist.

    Raises the first error of any thread: :class:`UserError` for bad input, ``OSError`` when the disk refuses.
    """
    queue = deque(streams)
    hashes: dict[str, str] = {}
    errors: list[BaseException] = []
    descriptors = {path: os.open(path, os.O_WRONLY) for path in {o.path for s in streams for o in s.outputs}}

    def work() -> None:
        buffer = memoryview(bytearray(BLOCK))
        while not errors:
            try:
                stream = queue.popleft()
            except IndexError:
                return
            try:
                hashes.update(_run(files, stream, descriptors, buffer, progress))
            except BaseException as error:
                errors.append(error)

    try:
        threads = [threading.Thread(target=work) for _ in range(min(_workers(), len(streams)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            _join(thread, errors)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    if errors:
        raise errors[0]
    return hashes


def _workers() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1))


def _join(thread: threading.Thread, errors: list[BaseException]) -> None:
    """Wait for a thread; an interrupt (Ctrl-C) stops the others too."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as interrupt:
            errors.append(interrupt)


def _run(
    files: Files, stream: Stream, descriptors: dict[Path, int], buffer: memoryview, progress: Progress
) -> dict[str, str]:
    hashes = {name: hashlib.sha256() for name, _ in stream.parts if name}
    sink = _Sink(stream.outputs, descriptors)
    for name, tensor in stream.parts:
        if tensor.row_bytes > len(buffer):
            buffer = memoryview(bytearray(tensor.row_bytes))
        step = len(buffer) // max(1, tensor.row_bytes)
        for start in range(0, tensor.rows, step):
            stop = min(start + step, tensor.rows)
            block = buffer[: (stop - start) * tensor.row_bytes]
            read_rows(files, tensor, start, stop, block)
            if name:
                hashes[name].update(block)
            sink.write(block)
            progress(len(block))
    sink.close()
    return {name: digest.hexdigest() for name, digest in hashes.items()}


class _Sink:
    """Spreads a stream over its outputs."""

    def __init__(self, outputs: Sequence[Output], descriptors: dict[Path, int]) -> None:
        self._outputs = deque(outputs)
        self._descriptors = descriptors
        self._done = self._crc = 0

    def write(self, block: memoryview) -> None:
        while len(block) and self._outputs:
            output = self._outputs[0]
            part = block[: output.nbytes - self._done]
            self._put(output, output.offset + self._done, part)
            if output.finish:
                self._crc = zlib.crc32(part, self._crc)
            self._done += len(part)
            block = block[len(part) :]
            if self._done == output.nbytes:
                self._finish()

    def close(self) -> None:
        """Outputs of no bytes have seen no block."""
        while self._outputs:
            self._finish()

    def _finish(self) -> None:
        output = self._outputs.popleft()
        for offset, data in output.finish(self._crc) if output.finish else ():
            self._put(output, offset, memoryview(data))
        self._done = self._crc = 0

    def _put(self, output: Output, offset: int, data: memoryview) -> None:
        descriptor = self._descriptors[output.path]
        while len(data):
            written = os.pwrite(descriptor, data, offset)
            data, offset = data[written:], offset + written
