"""Judge in processes with hard limits on time and memory, so that neither a hanging sympy nor a
user's function stops a run.

Pairs that need no process are decided here at once (``PoolWork.quick``). The others go to workers,
and their verdicts are cached if ``PoolWork.remember`` allows it. The first such pair starts a
worker, and every ``PoolWork.pairs_per_worker`` waiting pairs start another. One thread serves the
workers while there is a pair to judge; callers in any thread wait only for the pairs that they have
passed. A worker that overruns its wall time or dies is replaced, and its pair is lost
(``PoolWork.lost``). One that is killed, or late, while it starts is replaced, up to ``STARTS``
times in a row; one that ends by itself is an error of the installation. Memory is bounded:
``PoolWork.memory_bytes`` for each worker, and for the verdicts kept here ``CACHE_SIZE`` pairs of
``CACHE_CHARACTERS`` characters together.

The workers are plain subprocesses: they inherit no torch threads, gloo sockets or locks of the
trainer, and need no ``__main__`` guard in a user's script.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import selectors
import shlex
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

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import cores_per_rank

CACHE_SIZE = 200_000
# a model that writes long answers must not fill the trainer's memory
CACHE_CHARACTERS = 20_000_000
# for the imports, on a busy machine; no pair is waiting in the worker yet
_START_SECONDS = 120.0
# workers in a row that may be killed, or be late, before one is ready
STARTS = 5
# a worker ends itself at its wall time, and the parent only has to notice
_GRACE_SECONDS = 1.0
_MODULE = "megatron_dcpo.judging.worker"

Pair = tuple[str, ...]  # to be judged: an answer and its key, or one JSON text


@dataclass(frozen=True)
class PoolWork:
    """The work of a pool's workers.

    A worker calls the function with the import path ``load`` once, with ``arguments``. The function
    that this returns is called with each pair, and its verdict travels as JSON.

    ``lost(why)`` returns the verdict on a pair that ran out of time, raised, or ended its worker.
    ``quick(pair)`` returns the verdict on a pair that needs no worker, or else None. ``remember``
    says that equal pairs have equal verdicts. With ``beyond_imports``, ``memory_bytes`` do not
    include what the imports take. ``hash_seed`` is PYTHONHASHSEED; if it is empty, each worker
    draws its own.
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
    """A process, its current pair (None if it is idle or not ready yet), and its deadline.
    ``failed_before`` counts the starts in a row that had failed when it was started.
    """

    process: subprocess.Popen[bytes]
    deadline: float
    failed_before: int = 0
    ready: bool = False
    pair: Pair | None = None
    received: bytearray = field(default_factory=bytearray)


@dataclass
class PoolStatistics:
    """Counts of what happened to the pairs since the pool was made."""

    quick: int = 0
    cached: int = 0
    judged: int = 0
    late: int = 0
    replaced: int = 0


class WorkerNotStarted(UserError):
    """The verifier processes do not start on this machine."""


class WorkerPool:
    """Judges pairs in workers. Thread-safe; a forked child starts its own workers."""

    def __init__(self, work: PoolWork, workers: int | None = None) -> None:
        self.work = work
        self.max_workers = workers or cores_per_rank()
        self._reset()
        atexit.register(self.close)

    def _reset(self) -> None:
        """Start with an empty pool in this process."""
        self.statistics = PoolStatistics()
        self._workers: list[Worker] = []
        self._cache: OrderedDict[Pair, Any] = OrderedDict()
        self._cached_characters = 0
        self._died_on: set[Pair] = set()
        self._failed_starts = 0  # since a worker was ready
        self._waiting: deque[Pair] = deque()
        # the pairs that wait and those that workers are judging
        self._asked: dict[Pair, Future[Any]] = {}
        self._thread: threading.Thread | None = None
        # new pairs wake the thread
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._closed = False
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def verify(self, pairs: Sequence[Pair]) -> list[Any]:
        """Return the verdicts in the order of ``pairs``. Never raises on their content."""
        if self._owner != os.getpid():
            self._reset()  # the workers, the thread and the lock belong to the parent
        quick = {pair: self.work.quick(pair) for pair in dict.fromkeys(pairs)}
        pending: dict[Pair, Any] = {}
        with self._lock:
            for pair, verdict in quick.items():
                if verdict is None:
                    pending[pair] = self._ask(pair)
                else:
                    pending[pair] = verdict
                    self.statistics.quick += 1
            if self._waiting:
                self._wake()
        verdicts: dict[Pair, Any] = {}
        for pair, verdict in pending.items():
            if isinstance(verdict, Future):
                verdict = verdict.result()
            verdicts[pair] = verdict
        return [verdicts[pair] for pair in pairs]

    def close(self) -> None:
        """End the workers and cancel the pairs that still wait. The pool can be used again
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
        """Return the verdict on a pair that needs a worker, or a future that will hold it."""
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
            self._thread = threading.Thread(target=self._serve, name="verifier", daemon=True)
            self._thread.start()
        # the socket is full if the thread has not read the earlier calls yet
        with contextlib.suppress(BlockingIOError):
            self._wake_writer.send(b"!")

    def _serve(self) -> None:
        """Judge while there are pairs, as the thread of the pool. An error of the installation is
        raised in all callers that wait.
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
            if not self._closed and (self._waiting or any(worker.pair for worker in self._workers)):
                return True
            self._thread = None  # the next pair starts a new thread
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
                now = time.monotonic()
                for worker in [w for w in self._workers if w.deadline < now]:
                    self._retire(worker, selector)

    def _fill(self, selector: selectors.BaseSelector) -> None:
        """Give every idle worker a pair, and start more workers if many pairs wait."""
        waiting = self._waiting
        for worker in list(self._workers):
            if worker.ready and worker.pair is None and waiting:
                self._send(worker, waiting.popleft())
        about_to_be_ready = sum(worker.pair is None for worker in self._workers)
        wanted = math.ceil(len(waiting) / self.work.pairs_per_worker)
        more = max(0, wanted - about_to_be_ready)
        target = min(self.max_workers, len(self._workers) + more)
        while waiting and len(self._workers) < max(1, target):
            worker = self._start()
            self._workers.append(worker)
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]

    def _program(self) -> list[str]:
        return [sys.executable, "-m", _MODULE]

    def _start(self) -> Worker:
        work = self.work
        command = self._program()
        command += ["--cpu", str(work.cpu_seconds)]
        command += ["--wall", str(work.wall_seconds)]
        command += ["--memory", str(work.memory_bytes)]
        if work.beyond_imports:
            command.append("--beyond-imports")
        command += ["--parent", str(os.getpid()), work.load, *work.arguments]
        package_root = str(Path(__file__).resolve().parents[2])
        environment = dict(os.environ)
        search_path = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))
        environment["PYTHONPATH"] = search_path
        environment["OMP_NUM_THREADS"] = "1"
        if work.hash_seed:
            environment["PYTHONHASHSEED"] = work.hash_seed
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # so that the processes it forks end with it
            )
        except OSError as error:
            raise WorkerNotStarted(
                f"a verifier process did not start: {command[0]} cannot be run ({error.strerror})"
            ) from None
        return Worker(
            process=process,
            deadline=time.monotonic() + _START_SECONDS,
            failed_before=self._failed_starts,
        )

    def _send(self, worker: Worker, pair: Pair) -> None:
        worker.pair = pair
        worker.deadline = time.monotonic() + self.work.wall_seconds + _GRACE_SECONDS
        assert worker.process.stdin is not None
        # ASCII, in which lone surrogates survive as escapes
        line = json.dumps(pair).encode() + b"\n"
        # that a worker has ended shows in its stdout
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
                self._failed_starts = 0
            elif worker.pair is not None:
                self.statistics.late += word == b"late"
                if word in (b"late", b"raised"):
                    verdict = self._lost(word.decode())
                else:
                    verdict = json.loads(word)
                pair = worker.pair
                worker.pair = None
                if last:  # the worker holds too much memory for another pair
                    self._retire(worker, selector)
                self._record(pair, verdict)
                if last:
                    return

    def _retire(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        """Give up a worker that is late or gone. Its pair is lost, unless the worker died in time
        and the pair has not ended another one before. Raises :class:`WorkerNotStarted` if a worker
        ended by itself before it was ready, or if too many in a row were not ready.
        """
        selector.unregister(worker.process.stdout)  # type: ignore[arg-type]
        self._workers.remove(worker)
        in_time = time.monotonic() < worker.deadline - _GRACE_SECONDS
        if not worker.ready and in_time:
            # its output is closed: it is gone, or about to end with its own status
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_GRACE_SECONDS)
        _end(worker)
        if not worker.ready:
            # concurrent failures count once
            failed = max(self._failed_starts, worker.failed_before + 1)
            self._failed_starts = failed
            # a late one has just been killed here, another by the kernel or an operator
            was_killed = worker.process.returncode < 0
            if was_killed and failed < STARTS:
                self.statistics.replaced += 1
                return
            again = [*self._program(), "--cpu", "1", "--wall", "1"]
            again += ["--memory", str(self.work.memory_bytes)]
            again += ["--parent", str(os.getpid()), self.work.load]
            raise WorkerNotStarted(
                f"a verifier process did not start (exit status {worker.process.returncode}); try: "
                f"{shlex.join([*again, *self.work.arguments])}"
            )
        self.statistics.replaced += 1
        if worker.pair is None:
            return
        if in_time and worker.pair not in self._died_on:
            # it may have been killed from outside
            self._died_on.add(worker.pair)
            self._waiting.appendleft(worker.pair)
            return
        if in_time:
            verdict = self._lost("its process ended")
        else:
            self.statistics.late += 1
            verdict = self._lost("late")
        self._record(worker.pair, verdict)

    def _lost(self, why: str) -> object:
        """Return the verdict on a lost pair."""
        if why == "late":
            why = f"no verdict in {self.work.wall_seconds:g} s"
        return self.work.lost(why)

    def _record(self, pair: Pair, verdict: object) -> None:
        self.statistics.judged += 1
        self._died_on.discard(pair)
        with self._lock:
            if self.work.remember:
                self._cache[pair] = verdict
                self._cached_characters += sum(map(len, pair))
            while len(self._cache) > CACHE_SIZE or self._cached_characters > CACHE_CHARACTERS:
                oldest, _ = self._cache.popitem(last=False)
                self._cached_characters -= sum(map(len, oldest))
            waiting_calls = self._asked.pop(pair)
        waiting_calls.set_result(verdict)

    def _alive(self, worker: Worker) -> bool:
        """Return whether a worker is alive and idle, and end it otherwise.

        It may have been killed in the meantime, for instance by the kernel, or still owe a thread
        that failed an answer that nobody waits for.
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
