"""Is an answer of mathematics right? Decided in processes with hard time limits: a hanging sympy cannot stop a run.

Most pairs need no algebra and are decided here at once (``quick_verdict``). The others are cached by (answer, key) and
judged by workers, which are started when the first such pair comes, one more for every ``PAIRS_PER_WORKER`` that wait.
A worker that overruns its wall time or dies is replaced; its pair is wrong. Memory is bounded: ``worker.MEMORY_BYTES``
for each worker, and for the verdicts kept here ``CACHE_SIZE`` pairs of ``CACHE_CHARACTERS`` characters together.

The workers are plain subprocesses: they inherit no torch threads, no gloo sockets and no lock of the trainer, and need
no ``__main__`` guard in a user's script.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_dcpo.judging.answers import Outcome
from megatron_dcpo.judging.math.equivalence import quick_verdict
from megatron_dcpo.runtime import cores_per_rank

CPU_SECONDS = 1.5
WALL_SECONDS = 6.0
PAIRS_PER_WORKER = 32
CACHE_SIZE = 200_000
CACHE_CHARACTERS = 20_000_000  # a model that writes long answers must not fill the trainer's memory
_START_SECONDS = 120.0  # imports on a machine that is busy; no pair is waiting in the worker yet
_GRACE_SECONDS = 1.0  # the worker ends itself at the wall time; the parent only has to notice

Pair = tuple[str, str]


@dataclass
class Worker:
    """A process, the pair it is at (None: idle, or not ready yet), and until when it may be."""

    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    pair: Pair | None = None
    received: bytearray = field(default_factory=bytearray)


@dataclass
class PoolStatistics:
    """What happened to the pairs since the pool was made."""

    quick: int = 0
    cached: int = 0
    judged: int = 0
    late: int = 0
    replaced: int = 0


class VerifierPool:
    """``verify(pairs)``: one bool per (answer, key). Thread-safe; a forked child makes its own workers."""

    def __init__(
        self, workers: int | None = None, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS
    ) -> None:
        self.max_workers = workers or cores_per_rank()
        self.cpu_seconds, self.wall_seconds = cpu_seconds, wall_seconds
        self._reset()

    def _reset(self) -> None:
        """An empty pool of this process."""
        self.statistics = PoolStatistics()
        self._workers: list[Worker] = []
        self._cache: OrderedDict[Pair, bool] = OrderedDict()
        self._cached_characters = 0
        self._died_on: set[Pair] = set()
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def verify(self, pairs: Sequence[Pair]) -> list[bool]:
        """Verdicts in the order of ``pairs``. Never raises on their content."""
        if self._owner != os.getpid():  # the workers and the lock are the parent's
            self._reset()
        with self._lock:
            verdicts: dict[Pair, bool] = {}
            waiting: dict[Pair, None] = {}
            for pair in pairs:
                if pair in verdicts or pair in waiting:
                    continue
                quick = quick_verdict(*pair)
                if quick is not None:
                    self.statistics.quick += 1
                    verdicts[pair] = quick
                elif pair in self._cache:
                    self.statistics.cached += 1
                    self._cache.move_to_end(pair)
                    verdicts[pair] = self._cache[pair]
                else:
                    waiting[pair] = None
            if waiting:
                verdicts |= self._judge(deque(waiting))
            return [verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """End the workers. The pool can be used again afterwards."""
        with self._lock:
            if self._owner == os.getpid():
                for worker in self._workers:
                    _end(worker)
            self._workers = []

    def _judge(self, waiting: deque[Pair]) -> dict[Pair, bool]:
        verdicts: dict[Pair, bool] = {}
        self._workers = [worker for worker in self._workers if self._alive(worker)]
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            while waiting or any(worker.pair for worker in self._workers):
                self._fill(waiting, selector)
                soonest = min((worker.deadline for worker in self._workers), default=0.0)
                for event, _ in selector.select(max(0.0, soonest - time.monotonic())):
                    self._on_readable(event.data, waiting, verdicts, selector)
                for worker in [w for w in self._workers if w.deadline < time.monotonic()]:
                    self._retire(worker, waiting, verdicts, selector)
            return verdicts

    def _fill(self, waiting: deque[Pair], selector: selectors.BaseSelector) -> None:
        """Give every idle worker a pair; start workers while there is much to do."""
        for worker in list(self._workers):
            if worker.ready and worker.pair is None and waiting:
                self._send(worker, waiting.popleft())
        busy = sum(1 for worker in self._workers if worker.pair is None)  # about to be ready
        target = min(self.max_workers, len(self._workers) + max(0, -(-len(waiting) // PAIRS_PER_WORKER) - busy))
        while waiting and len(self._workers) < max(1, target):
            worker = self._start()
            self._workers.append(worker)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def _start(self) -> Worker:
        limits = ["--cpu", str(self.cpu_seconds), "--wall", str(self.wall_seconds), "--parent", str(os.getpid())]
        root = str(Path(__file__).resolve().parents[3])  # the package, wherever the trainer was started
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_dcpo.judging.math.worker", *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        return Worker(process, time.monotonic() + _START_SECONDS)

    def _send(self, worker: Worker, pair: Pair) -> None:
        worker.pair = pair
        worker.deadline = time.monotonic() + self.wall_seconds + _GRACE_SECONDS
        assert worker.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its stdout is closed as well, and read as the end of the worker
            worker.process.stdin.write(json.dumps(pair).encode() + b"\n")  # ASCII: lone surrogates survive escaped
            worker.process.stdin.flush()

    def _on_readable(
        self, worker: Worker, waiting: deque[Pair], verdicts: dict[Pair, bool], selector: selectors.BaseSelector
    ) -> None:
        chunk = os.read(worker.process.stdout.fileno(), 4096)  # type: ignore[union-attr]
        if not chunk:
            self._retire(worker, waiting, verdicts, selector)
            return
        worker.received += chunk
        while (end := worker.received.find(b"\n")) >= 0:
            word, _, last = bytes(worker.received[:end]).partition(b" ")
            del worker.received[: end + 1]
            worker.deadline = float("inf")
            if word == b"ready":
                worker.ready = True
            elif worker.pair is not None:
                self.statistics.late += word == b"late"
                self._record(worker.pair, word == b"yes", verdicts)
                worker.pair = None
                if last:  # it has used up its memory
                    self._retire(worker, waiting, verdicts, selector)
                    return

    def _retire(
        self, worker: Worker, waiting: deque[Pair], verdicts: dict[Pair, bool], selector: selectors.BaseSelector
    ) -> None:
        """A worker is late or gone. Its pair is wrong, at the latest when a second worker dies on it; one that never
        became ready is an error of the installation."""
        selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self._workers.remove(worker)
        _end(worker)
        if not worker.ready:
            raise RuntimeError(
                f"a verifier process did not start (exit status {worker.process.returncode}); try: "
                f"{sys.executable} -c 'import megatron_dcpo.judging.math.worker, math_verify'"
            )
        self.statistics.replaced += 1
        if worker.pair is None:
            return
        in_time = time.monotonic() < worker.deadline - _GRACE_SECONDS
        if in_time and worker.pair not in self._died_on:  # it may have been killed from outside
            self._died_on.add(worker.pair)
            waiting.appendleft(worker.pair)
            return
        self.statistics.late += not in_time
        self._record(worker.pair, False, verdicts)

    def _record(self, pair: Pair, verdict: bool, verdicts: dict[Pair, bool]) -> None:
        self.statistics.judged += 1
        self._died_on.discard(pair)
        verdicts[pair] = self._cache[pair] = verdict
        self._cached_characters += sum(map(len, pair))
        while len(self._cache) > CACHE_SIZE or self._cached_characters > CACHE_CHARACTERS:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_characters -= sum(map(len, oldest))

    def _alive(self, worker: Worker) -> bool:
        """Workers may have been killed between two calls, by the kernel for instance; those of an interrupted call
        (KeyboardInterrupt) still owe an answer that nobody waits for."""
        if worker.process.poll() is None and worker.pair is None:
            return True
        _end(worker)
        return False


def _end(worker: Worker) -> None:
    worker.process.kill()
    for stream in (worker.process.stdin, worker.process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    worker.process.wait()


_POOL = VerifierPool()
atexit.register(_POOL.close)


def shared_pool() -> VerifierPool:
    """The pool of this process."""
    return _POOL


def verify_answers(pairs: Sequence[tuple[str | None, str]]) -> list[Outcome]:
    """The outcome of each (answer or None, key), side by side. No answer is a wrong one.

    Nothing raises: what cannot be parsed, or not in time, is wrong.
    """
    verdicts = iter(equivalent_many([(answer, key) for answer, key in pairs if answer is not None]))
    return [Outcome(answer is not None and next(verdicts)) for answer, _ in pairs]


def equivalent_many(pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether each (answer, key) is the same number, set, expression ...; answers without their boxes."""
    return shared_pool().verify([(answer.strip(), key.strip()) for answer, key in pairs])
