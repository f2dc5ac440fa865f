"""The parts that import and export share: the record of a conversion, threads, hashes,
verification.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from megatron_dcpo import __version__
from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.conversion.megatron_checkpoint import MegatronCheckpoint, as_bytes
from megatron_dcpo.conversion.parameters import Slice, locate, slices
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import FLOATS, dtype_bytes
from megatron_dcpo.weights.hf_checkpoint import HFReader, Specs
from megatron_dcpo.weights.table import EMBEDDING

_THREADS = min(4, os.cpu_count() or 1)

Progress = Callable[[int, int], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, written as ``conversion.json`` into its result.

    ``tensors`` has the SHA-256 of every Hugging Face tensor that was moved. ``seconds`` does not
    include verification.
    """

    direction: str
    source: str
    target: str
    architecture: str
    dtype: str
    bytes_moved: int
    seconds: float
    verify_seconds: float | None
    peak_resident_bytes: int
    peak_anonymous_bytes: int
    padding: dict[str, int]
    ignored: tuple[str, ...]
    tensors: dict[str, str] = field(repr=False)
    version: str = __version__


class PeakMemory:
    """Samples resident and anonymous memory of this process while the block runs.

    Anonymous memory (heap, buffers) is what a machine must have. Resident memory also counts mapped
    files, which the kernel can drop.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self.anonymous_bytes = 0
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        stopped = False
        while not stopped:
            sample = self._process.memory_info()
            anonymous = sample.rss - getattr(sample, "shared", 0)
            self.resident_bytes = max(self.resident_bytes, sample.rss)
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous)
            stopped = self._stop.wait(0.02)


def one_dtype(where: Path, specs: Specs) -> str:
    """Return the common element type. Raises :class:`UserError` naming the first tensor that
    differs.
    """
    expected = float_dtype(where, specs)
    for name, (_, dtype) in specs.items():
        if dtype != expected:
            raise UserError(f"{where}: {name} has dtype {dtype}, but {EMBEDDING} has {expected}")
    return expected


def float_dtype(where: Path, specs: Specs) -> str:
    """Return the element type of the embedding. Raises :class:`UserError` for a tensor of another
    than the known types.

    Other tensors may differ from it, because Megatron's local RMSNorm is fp32 in a bf16 model that
    was never wrapped. They keep their bits.
    """
    for name, (_, dtype) in specs.items():
        if dtype not in FLOATS:
            raise UserError(
                f"{where}: {name} has dtype {dtype}; known: {', '.join(sorted(FLOATS))}"
            )
    return specs[EMBEDDING][1]


def verify_bytes(
    arch: Architecture, checkpoint: MegatronCheckpoint, reader: HFReader, progress: Progress
) -> float:
    """Read source and result again and compare them byte for byte; return the seconds it took.
    Raises :class:`UserError` for a difference.
    """
    clock = time.perf_counter()
    located = locate(arch, checkpoint)
    total = sum(math.prod(shape) * dtype_bytes(dtype) for shape, dtype in reader.specs.values())
    count = byte_counter(progress, total)

    def compare(parameter: list[Slice]) -> int:
        nbytes = 0
        for part in parameter:
            stop = part.start + part.values.numel()
            expected = as_bytes(reader.tensor(part.name)).view(-1)[part.start : stop]
            if not torch.equal(expected, part.values.reshape(-1)):
                raise UserError(
                    f"verification failed: {part.name} reads back differently; check the disk"
                )
            nbytes += part.values.numel()
        return nbytes

    for nbytes in in_threads(compare, slices(arch, checkpoint, located)):
        count(nbytes)
    return time.perf_counter() - clock


@contextmanager
def few_threads() -> Iterator[ThreadPoolExecutor]:
    """Open a pool of a few threads. When the block ends or fails, tasks that have not begun are
    dropped.
    """
    pool = ThreadPoolExecutor(_THREADS)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's own threads would compete with these for cores, spinning
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(torch_threads)


def in_threads(
    function: Callable[[list[Slice]], Result], parameters: Iterable[list[Slice]]
) -> Iterator[Result]:
    """Yield ``function`` of each parameter. Only a few parameters exist at a time, because one that
    is joined from chunks takes memory.
    """
    with few_threads() as pool:
        pending: deque[Future[Result]] = deque()
        for parameter in parameters:
            pending.append(pool.submit(function, parameter))
            if len(pending) == _THREADS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def sha256(tensor: Tensor) -> str:
    return hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()


def byte_counter(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        progress(done, total)

    return add


def write_record(directory: Path, result: Conversion) -> None:
    (directory / "conversion.json").write_text(json.dumps(result.__dict__, indent=1) + "\n")
