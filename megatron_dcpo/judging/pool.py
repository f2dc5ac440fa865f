"""Judge in processes with hard limits of time and memory: neither a hanging sympy nor a user's
function stops a run.

What needs no process is decided here at once (``PoolWork.quick``). The rest is cached where it may
be and judged by workers, which are started when the first such pair comes, one more for every
``PoolWork.pairs_per_worker`` that wait. One thread serves the workers while there is a pair to
judge; callers in any thread wait for their own pairs only. A worker that overruns its wall time or
dies is replaced; its pair is lost (``PoolWork.lost``). Memory is bounded: ``PoolWork.memory_bytes``
for each worker, and for the verdicts kept here ``CACHE_SIZE`` pairs of ``CACHE_CHARACTERS``
characters together.

The workers are plain subprocesses: they inherit no torch threads, no gloo sockets and no lock of
the trainer, and need no ``__main__`` guard in a user's script.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dcpo.runtime import cores_per_rank

CACHE_SIZE = 200_000
CACHE_CHARACTERS = (
    20_000_000  # a model that writes long answers must not fill the trainer's memory
)
_START_SECONDS = (
    120.0  # imports on a machine that is busy; no pair is waiting in the worker yet
)
_GRACE_SECONDS = (
    1.0  # the worker ends itself at the wall time; the parent only has to notice
)

Pair = tuple[str, ...]  # what is judged: an answer and its key, or one JSON text


@dataclass(frozen=True)
class PoolWork:
    """What the workers of a pool do. ``load``: import path of a function that a worker calls once,
    with ``arguments``; what it returns is called with each pair, and its verdict travels as JSON.

    ``lost(why)``: the verdict on a pair that ran out of time, raised, or ended its worker.
    ``quick``: the verdict on a pair that needs no worker, else None. ``remember``: equal pairs have
    equal verdicts. ``beyond_imports``: ``memory_bytes`` do not count what imports take.
    ``hash_seed``: Python's, of sets and dictionaries ("": another one in each worker).
    """

    load: str
    lost: Callable[[str], Any]
    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    arguments: tuple[str, ...] = ()
    quick: Callable[[Pair], Any] = lambda pair: None
    remember: bool = True
    beyond_imports: bool = False
    hash_seed: str = ""
    pairs_per_worker: int = 32


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


class WorkerPool:
    """Judges pairs in workers. Thread-safe; a forked child starts its own workers."""

    def __init__(self, work: PoolWork, workers: int | None = None) -> None:
        self.work, self.max_workers = work, workers or cores_per_rank()
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        """Begin an empty pool of this process."""
        self.statistics = PoolStatistics()
        self._workers: list[Worker] = []
        self._cache: OrderedDict[Pair, Any] = OrderedDict()
        self._cached_characters = 0
        self._died_on: set[Pair] = set()
        self._waiting: deque[Pair] = deque()
        self._asked: dict[
            Pair, Future[Any]
        ] = {}  # the pairs that wait and those that workers are at
        self._thread: threading.Thread | None = None
        self._wake_reader, self._wake_writer = (
            socket.socketpair()
        )  # new pairs wake the thread
        self._wake_writer.setblocking(False)
        self._closed = False
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def verify(self, pairs: Sequence[Pair]) -> list[Any]:
        """Return the verdicts in the order of ``pairs``. Never raises on their content."""
        if (
            self._owner != os.getpid()
        ):  # the workers, the thread and the lock are the parent's
            self._reset()
        quick = {pair: self.work.quick(pair) for pair in dict.fromkeys(pairs)}
        with self._lock:
            verdicts = {
                pair: self._ask(pair) if verdict is None else verdict
                for pair, verdict in quick.items()
            }
            self.statistics.quick += sum(
                verdict is not None for verdict in quick.values()
            )
            if self._waiting:
                self._wake()
        found = {
            pair: one.result() if isinstance(one, Future) else one
            for pair, one in verdicts.items()
        }
        return [found[pair] for pair in pairs]

    def close(self) -> None:
        """End the workers; pairs that still wait are cancelled. The pool can be used again
        afterwards.
        """
        if self._owner != os.getpid():
            self._reset()
            return
        with self._lock:
            self._closed = True
            if thread := self._thread:
                self._wake()
        if thread is not None:
            thread.join()
        for worker in self._workers:
            _end(worker)
        self._workers = []
        self._forget(None)

    def _ask(self, pair: Pair) -> object | Future[object]:
        """Return the verdict on a pair that needs a worker, now or later."""
        if pair in self._cache:
            self.statistics.cached += 1
            self._cache.move_to_end(pair)
            return self._cache[pair]
        if pair not in self._asked:
            self._asked[pair] = Future()
            self._waiting.append(pair)
        return self._asked[pair]

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="verifier", daemon=True
            )
            self._thread.start()
        with contextlib.suppress(
            BlockingIOError
        ):  # it has not heard the ones before yet
            self._wake_writer.send(b"!")

    def _serve(self) -> None:
        """Run the thread, which lives while there is something to judge. An error of the
        installation goes to all who wait.
        """
        try:
            self._judge()
        except BaseException as error:
            self._forget(error)

    def _forget(self, error: BaseException | None) -> None:
        with self._lock:
            left = self._asked
            self._asked = {}
            self._waiting = deque()
            self._thread = None
            self._closed = False
        for future in left.values():
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)

    def _anything_left(self) -> bool:
        with self._lock:
            if not self._closed and (
                self._waiting or any(worker.pair for worker in self._workers)
            ):
                return True
            self._thread = None  # the next pair gets a thread of its own
            return False

    def _judge(self) -> None:
        self._workers = [worker for worker in self._workers if self._alive(worker)]
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
            while self._anything_left():
                self._fill(selector)
                soonest = min(worker.deadline for worker in self._workers)
                for event, _ in selector.select(max(0.0, soonest - time.monotonic())):
                    if event.data is None:
                        self._wake_reader.recv(4096)
                    else:
                        self._on_readable(event.data, selector)
                for worker in [
                    w for w in self._workers if w.deadline < time.monotonic()
                ]:
                    self._retire(worker, selector)

    def _fill(self, selector: selectors.BaseSelector) -> None:
        """Give every idle worker a pair; start workers while there is much to do."""
        waiting = self._waiting
        for worker in list(self._workers):
            if worker.ready and worker.pair is None and waiting:
                self._send(worker, waiting.popleft())
        about_to_be_ready = sum(worker.pair is None for worker in self._workers)
        wanted = -(-len(waiting) // self.work.pairs_per_worker)
        more = max(0, wanted - about_to_be_ready)
        target = min(self.max_workers, len(self._workers) + more)
        while waiting and len(self._workers) < max(1, target):
            worker = self._start()
            self._workers.append(worker)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def _start(self) -> Worker:
        work = self.work
        command = [sys.executable, "-m", "megatron_dcpo.judging.worker"]
        command += ["--cpu", str(work.cpu_seconds)]
        command += ["--wall", str(work.wall_seconds)]
        command += ["--memory", str(work.memory_bytes)]
        if work.beyond_imports:
            command.append("--beyond-imports")
        command += ["--parent", str(os.getpid()), work.load, *work.arguments]
        package_root = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [package_root, os.environ.get("PYTHONPATH")])
        )
        environment["OMP_NUM_THREADS"] = "1"
        if work.hash_seed:
            environment["PYTHONHASHSEED"] = work.hash_seed
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # processes that it forks end with it
        )
        return Worker(process, time.monotonic() + _START_SECONDS)

    def _send(self, worker: Worker, pair: Pair) -> None:
        worker.pair = pair
        worker.deadline = time.monotonic() + self.work.wall_seconds + _GRACE_SECONDS
        assert worker.process.stdin is not None
        line = (
            json.dumps(pair).encode() + b"\n"
        )  # ASCII: lone surrogates survive escaped
        # a worker whose stdin is closed is seen to have ended by its stdout
        with contextlib.suppress(BrokenPipeError):
            worker.process.stdin.write(line)
            worker.process.stdin.flush()

    def _on_readable(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        chunk = os.read(worker.process.stdout.fileno(), 4096)  # type: ignore[union-attr]
        if not chunk:
            self._retire(worker, selector)
            return
        worker.received += chunk
        while (end := worker.received.find(b"\n")) >= 0:
            word = bytes(worker.received[:end])
            last = word.startswith(b"last ")
            word = word.removeprefix(b"last ")
            del worker.received[: end + 1]
            worker.deadline = float("inf")
            if word == b"ready":
                worker.ready = True
            elif worker.pair is not None:
                self.statistics.late += word == b"late"
                if word in (b"late", b"raised"):
                    verdict = self._lost(word.decode())
                else:
                    verdict = json.loads(word)
                pair = worker.pair
                worker.pair = None
                if last:  # it has used up its memory
                    self._retire(worker, selector)
                self._record(pair, verdict)
                if last:
                    return

    def _retire(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        """Give up a worker that is late or gone. Its pair is lost, at the latest when a second
        worker dies on it; one that never became ready is an error of the installation.
        """
        selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self._workers.remove(worker)
        _end(worker)
        if not worker.ready:
            raise RuntimeError(
                f"a verifier process did not start (exit status {worker.process.returncode}); try: "
                f"{sys.executable} -m megatron_dcpo.judging.worker --cpu 1 --wall 1 --memory "
                f"{self.work.memory_bytes} "
                f"--parent {os.getpid()} {' '.join([self.work.load, *self.work.arguments])}"
            )
        self.statistics.replaced += 1
        if worker.pair is None:
            return
        in_time = time.monotonic() < worker.deadline - _GRACE_SECONDS
        if (
            in_time and worker.pair not in self._died_on
        ):  # it may have been killed from outside
            self._died_on.add(worker.pair)
            self._waiting.appendleft(worker.pair)
            return
        self.statistics.late += not in_time
        self._record(
            worker.pair, self._lost("late" if not in_time else "its process ended")
        )

    def _lost(self, word: str) -> object:
        return self.work.lost(
            f"no verdict in {self.work.wall_seconds:g} s" if word == "late" else word
        )

    def _record(self, pair: Pair, verdict: object) -> None:
        self.statistics.judged += 1
        self._died_on.discard(pair)
        with self._lock:
            if self.work.remember:
                self._cache[pair] = verdict
                self._cached_characters += sum(map(len, pair))
            while (
                len(self._cache) > CACHE_SIZE
                or self._cached_characters > CACHE_CHARACTERS
            ):
                oldest, _ = self._cache.popitem(last=False)
                self._cached_characters -= sum(map(len, oldest))
            asked = self._asked.pop(pair)
        asked.set_result(verdict)

    def _alive(self, worker: Worker) -> bool:
        """Return the workers that live. Some may have been killed meanwhile, by the kernel for
        instance; those of a thread that failed still owe an answer that nobody waits for.
        """
        if worker.process.poll() is None and worker.pair is None:
            return True
        _end(worker)
        return False


def _end(worker: Worker) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    worker.process.kill()
    for stream in (worker.process.stdin, worker.process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    worker.process.wait()
