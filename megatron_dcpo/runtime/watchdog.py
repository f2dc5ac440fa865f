"""A heartbeat of every rank, in a thread besides the main thread, which may wait in a collective.

Every rank notes each second in the job's store what its main thread does: step, phase, line of
code. From these notes

* a signal that reached one rank reaches all of them within a second or two
  (:mod:`megatron_dcpo.runtime.signals`),
* a rank without a heartbeat for :data:`LOST_AFTER_SECONDS` ends the job with a line that names it.
  Collectives alone would wait for ``parallel.distributed_timeout_minutes`` if a node or a link
  fails without closing its connections,
* a phase that exceeds its budget is reported with the line at which every rank waits, and with the
  Python stacks in ``run_dir/heartbeat/``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megatron_dcpo.errors import EXIT_PEER_LOST, Stopped, one_line
from megatron_dcpo.runtime import signals
from megatron_dcpo.runtime.device import device_failed, memory_gb, synchronize
from megatron_dcpo.runtime.files import write_atomically
from megatron_dcpo.runtime.megatron_private import default_store

LOST_AFTER_SECONDS = 30.0
PHASE_WARNING_SECONDS = 900.0  # a longer phase is reported with the place where every rank waits
_INTERVAL = 1.0
_FILE_INTERVAL = 10.0
_SETUP_PATIENCE = 10
_DONE = "done"
_LIBRARIES = ("torch", "megatron", "transformers", "selectors", "subprocess", "threading")
_SHOWN = 8  # ranks or places named in one line


@dataclass(frozen=True)
class Heartbeat:
    """The last note of a rank. ``since`` is the Unix time at which the phase began; ``count`` grows
    with every beat.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    since: float
    where: str
    count: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.host}, pid {self.pid}), in {self.phase} of step {self.step} "
            f"at {self.where}"
        )


class Watchdog:
    """Watches from :meth:`start` on; used as a context around everything that communicates.

    If the block is left by an exception that a lost rank has caused, the process ends with a line
    that names the rank, because any clean-up would wait for it. An error of this rank's device ends
    the process in the same way, on every rank.
    """

    def __init__(
        self, directory: Path, rank: int, world_size: int, budget: float = PHASE_WARNING_SECONDS
    ) -> None:
        self.directory = directory
        self.rank = rank
        self.world_size = world_size
        self.budget = budget
        self._main = threading.get_ident()
        self._step = 0
        self._phase = "setup"
        self._since = time.time()
        self._count = 0
        self._warned_at = 0.0
        self._over = threading.Event()
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> (count, when it changed)
        self._beats: dict[int, Heartbeat] = {}
        self._contact = time.monotonic()
        self._store: Any = None

    def start(self) -> Watchdog:
        """Start the heartbeat. Collective."""
        if self.world_size > 1:
            store: Any = default_store()
            self._store = store.clone()  # because the main thread may wait on the other connection
            self._store.set_timeout(timedelta(seconds=LOST_AFTER_SECONDS))
            self._store.set(f"beat/{self.rank}", self._note())
            if self.rank == 0:
                self._store.set("stop", "")
                self._store.set("lost", "")
            dist.barrier()
            self._contact = time.monotonic()
            threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._keep_guard, name="watch", daemon=True).start()
        return self

    def enter(self, phase: str, step: int) -> None:
        """Note that the main thread begins ``phase`` of ``step``."""
        self._phase = phase
        self._step = step
        self._since = time.time()
        self._warned_at = 0.0
        self._write()

    def finish(self, clean_exit: bool = True) -> None:
        """Stop watching. With ``clean_exit`` this rank ends as planned, and the others do not miss
        it; ranks end at different moments.
        """
        self._over.set()
        self.enter(_DONE if clean_exit else "failed", self._step)
        if clean_exit and self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"beat/{self.rank}", self._note())

    def abort(self, message: str) -> None:
        """End the job on every rank with ``message``, if a rank has no other way out."""
        if self._store is not None:
            self._store.set("lost", message)
        self._end_process(message)

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, RuntimeError) and self.world_size > 1:
            lost = self._who_is_lost()
            if lost:
                self._end_process(f"{lost} ({one_line(error, 200)})")
        if device_failed(error):
            self.abort(
                f"the device of rank {self.rank} failed ({one_line(error or '', 200)}); no "
                "process can use it again "
                "before it ends. --resume auto continues after the last checkpoint"
            )
        self.finish(clean_exit=error is None or isinstance(error, Stopped))

    def _who_is_lost(self) -> str:
        """Return, after a failed collective, the ranks without a heartbeat, or nothing if all ranks
        have one.
        """
        signals.ignore_signals()  # the launcher is about to end all ranks
        try:
            before = self._read()
            time.sleep(3 * _INTERVAL)
            after = self._read()
            message = str(self._store.get("lost").decode())
            gone = [
                after[rank]
                for rank in after
                if after[rank].count == before[rank].count and rank != self.rank
            ]
            if gone and not message:
                message = _lost(gone)
                self._store.set("lost", message)
            if not message:
                signals.announce(
                    f"rank {self.rank} fails while all ranks are alive: {_places(before.values())}"
                )
            return message
        except RuntimeError:
            return self._out_of_contact()

    def _keep_beating(self) -> None:
        while not self._over.wait(_INTERVAL):
            try:
                if time.monotonic() - self._contact > LOST_AFTER_SECONDS / 2:
                    # this process was frozen itself, and so perhaps were the others
                    self._heard.clear()
                self._beat()
                self._contact = time.monotonic()
            except RuntimeError:  # torch's store errors
                self._over.wait(
                    3 * _INTERVAL
                )  # the main thread may be about to end, or to raise a better message
                if not self._over.is_set():
                    self._end_process(self._out_of_contact())

    def _beat(self) -> None:
        self._store.set(f"beat/{self.rank}", self._note())
        stop, lost = (value.decode() for value in self._store.multi_get(["stop", "lost"]))
        signalled = signals.stop_requested()
        if signalled and not stop:
            self._store.set("stop", str(int(signalled)))
        elif stop and not signalled:
            signals.request_stop(int(stop))
        if lost and not self._over.is_set():
            self._end_process(lost)
        # The first rank watches all the others, and they watch the first.
        self._beats = self._read(range(self.world_size) if self.rank == 0 else (0,))
        now = time.monotonic()
        silent = []
        for rank, beat in self._beats.items():
            count, since = self._heard.get(rank, (-1, now))
            if count == beat.count:
                self._heard[rank] = (count, since)
            else:
                self._heard[rank] = (beat.count, now)
            # Reading a large model from a slow disk may hold up every thread of a process for long.
            patience = LOST_AFTER_SECONDS * (_SETUP_PATIENCE if beat.phase == "setup" else 1)
            if now - self._heard[rank][1] > patience and beat.phase != _DONE and rank != self.rank:
                silent.append(beat)
        if silent and not self._over.is_set():
            message = _lost(silent)
            self._store.set("lost", message)
            self._end_process(message)

    def _keep_guard(self) -> None:
        written = before = 0.0
        while not self._over.wait(_INTERVAL):
            now = time.time()
            if now - before > LOST_AFTER_SECONDS / 2:
                self._contact = (
                    time.monotonic()
                )  # frozen and woken again, as a scheduler that suspends jobs does
            before = now
            if now - written > _FILE_INTERVAL:
                self._write()
                written = now
            if (
                self._store is not None
                and time.monotonic() - self._contact > 1.5 * LOST_AFTER_SECONDS
            ):
                self._end_process(
                    self._out_of_contact()
                )  # the heartbeat itself hangs in a dead connection
            if now - max(self._since, self._warned_at) > self.budget:
                self._warned_at = now
                self._warn(now - self._since)

    def _warn(self, seconds: float) -> None:
        with (
            contextlib.suppress(OSError),
            (self.directory / f"stacks_rank{self.rank:05d}.txt").open("w") as file,
        ):
            faulthandler.dump_traceback(file)
        if self.rank == 0:
            beats = self._beats or {0: Heartbeat(**json.loads(self._note()))}
            signals.announce(
                f"{self._phase} of step {self._step} has taken {seconds:.0f} s (more than "
                f"{self.budget:g}). "
                f"{_places(beats.values())}. Stacks of all ranks: {self.directory}"
            )

    def _note(self) -> str:
        self._count += 1
        where = _place_in_code(self._main)
        beat = Heartbeat(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self._step,
            phase=self._phase,
            since=self._since,
            where=where,
            count=self._count,
        )
        return json.dumps(asdict(beat))

    def _read(self, ranks: Iterable[int] | None = None) -> dict[int, Heartbeat]:
        ranks = list(range(self.world_size) if ranks is None else ranks)
        notes = self._store.multi_get([f"beat/{rank}" for rank in ranks])
        return {
            rank: Heartbeat(**json.loads(note)) for rank, note in zip(ranks, notes, strict=True)
        }

    def _write(self) -> None:
        path = self.directory / f"rank{self.rank:05d}.json"
        with contextlib.suppress(OSError):  # a full disk is reported by what matters
            self.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(path, self._note() + "\n")

    def _out_of_contact(self) -> str:
        if 0 in self._beats:
            last = f"; the first rank was {self._beats[0]}"
        else:
            last = ""
        return (
            f"the job's store at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} "
            "does not answer: its "
            f"launcher, its node or the link to it is gone{last}"
        )

    def _end_process(self, message: str) -> None:
        signals.announce(f"rank {self.rank} ends: {message}")
        if self.rank == 0:
            time.sleep(2.5 * _INTERVAL)  # it may be the host of the store where the others read why
        os._exit(EXIT_PEER_LOST)


class Timers:
    """Timers of phases: ``with timers("rollout"): ...`` adds to ``seconds["rollout"]``, measured
    after the device is done, and notes ``memory["rollout/rss"]`` in GB.

    The watchdog gets the phase of ``step`` that this rank is in. Without a watchdog, in a thread
    besides the main one, only the seconds are measured. Call ``clear`` after a step is recorded;
    its checkpoint comes later and is part of the next record.
    """

    def __init__(self, watch: Watchdog | None) -> None:
        self.watch = watch
        self.step = 0
        self.seconds: dict[str, float] = {}
        self.memory: dict[str, float] = {}

    def clear(self) -> None:
        self.seconds = {}
        self.memory = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        if self.watch is None:
            yield
            self.add(phase, time.perf_counter() - start)
            return
        self.watch.enter(phase, self.step)
        yield
        synchronize()
        self.add(phase, time.perf_counter() - start)
        self.memory |= {f"{phase}/{kind}": gigabytes for kind, gigabytes in memory_gb().items()}

    def add(self, phase: str, seconds: float) -> None:
        """Add seconds to a phase; also called from the judge's thread."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


def _lost(beats: list[Heartbeat]) -> str:
    named = "; ".join(map(str, beats[:_SHOWN])) + (
        f"; and {len(beats) - _SHOWN} more" if len(beats) > _SHOWN else ""
    )
    return f"lost {named}. --resume auto continues after the last checkpoint"


def _places(beats: Iterable[Heartbeat]) -> str:
    """Return ``rank 0, 2 and 5 more: train of step 3 at update.py:210 _reduce; rank 1: ...``"""
    ranks: dict[str, list[int]] = {}
    for beat in beats:
        ranks.setdefault(f"{beat.phase} of step {beat.step} at {beat.where}", []).append(beat.rank)
    shown = []
    for place, members in list(ranks.items())[:_SHOWN]:
        if len(members) > _SHOWN:
            more = f" and {len(members) - _SHOWN} more"
        else:
            more = ""
        shown.append(f"rank {', '.join(map(str, members[:_SHOWN]))}{more}: {place}")
    return "; ".join(shown)


def _place_in_code(thread: int) -> str:
    """Return ``file.py:line function`` of ``thread``: the innermost frame outside the libraries it
    waits in.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "start"
