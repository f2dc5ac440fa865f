"""Signals that end a run in good order, and ending together with the launcher. A process imports
this first, so it has no heavy imports.

A thread reads the signals from Python's wake-up descriptor. A plain handler would run between two
bytecodes of the main thread, and a main thread that waits in a collective executes none.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from megatron_dcpo.errors import EXIT_INTERRUPTED, EXIT_PEER_LOST, EXIT_REQUEUE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
LAUNCHER_PID = "DCPO_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_LAUNCHER_DIED = signal.SIGUSR2
# A scheduler signals every process of a job, and the launcher passes its own signal on to its
# workers.
_SAME_SIGNAL_SECONDS = 1.0

_begun = False
_stopping: int | None = None
_first_at = 0.0
_ignoring = False
_listening = False


class RolloutAbandoned(Exception):
    """Raised by an engine in the middle of a rollout if :func:`stop_requested`."""


def install_handlers() -> None:
    """Let SIGTERM, SIGUSR1 and SIGINT end the process at once, and from :func:`begin_saving` on ask
    the run to stop, where a second one ends the process at once. Idempotent.

    Main thread only. Under a launcher a repetition within a second counts as the same signal.
    """
    global _listening
    if _listening:
        return
    _listening = True
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in (*STOP_SIGNALS, _LAUNCHER_DIED):
        signal.signal(number, lambda *_: None)
    threading.Thread(
        target=_note_signals, args=(reader, writer), name="signals", daemon=True
    ).start()


def begin_saving() -> None:
    """From now on a signal is waited for until the run has saved what it did."""
    global _begun
    _begun = True


def stop_requested() -> int | None:
    """Return the signal that asks this run to stop, if any. It is cheap enough to be called for
    every sampled token.
    """
    return _stopping


def request_stop(number: int) -> None:
    """Stop as if ``number`` had been received; so the signal of one rank reaches the others."""
    global _stopping, _first_at
    if _stopping is None:
        _stopping = number
        _first_at = time.monotonic()


def ignore_signals() -> None:
    """Ignore further signals: everything is saved and the process is about to end."""
    global _ignoring
    _ignoring = True


def name_of(number: int) -> str:
    """Return ``SIGTERM`` for 15."""
    return signal.Signals(number).name


def under_launcher() -> bool:
    """Return whether torchrun or ``dcpo launch`` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """Return the rank of this process as its launcher says, before process groups exist: 0 without
    a launcher, or if it says no number, which ``distributed.initialize`` refuses.
    """
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def exit_with_launcher() -> None:
    """Have the kernel end this worker when its launcher ends, so that it does not train without it.
    Does nothing on systems other than Linux.

    It applies only under a launcher, because a process started from a shell must survive the shell.
    Call it after :func:`install_handlers`: the first worker of a node reports what happened, the
    others are killed without a message.
    """
    if not under_launcher() or not sys.platform.startswith("linux"):
        return
    number = signal.SIGKILL
    if _listening and os.environ.get("LOCAL_RANK") == "0":
        number = _LAUNCHER_DIED
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and os.getppid() != int(launcher):
        _launcher_died()  # before prctl


def as_child() -> Callable[[], None]:
    """Return the function that a child outside this package runs before its program. The child then
    ends with the thread that starts it, and ignores the warning of a scheduler, which would end it
    before the run is saved.
    """
    library = ctypes.CDLL(None)

    def prepare() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if sys.platform.startswith("linux"):
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare


def announce(message: str) -> None:
    """Write a line to stderr, at once: the process may be about to end."""
    print(f"dcpo: {message}", file=sys.stderr, flush=True)


def _launcher_died() -> None:
    host = socket.gethostname()
    announce(
        f"the launcher of {host} is gone: its workers end; --resume auto continues after the last "
        "checkpoint"
    )
    os._exit(EXIT_PEER_LOST)


def _note_signals(reader: socket.socket, writer: socket.socket) -> None:
    while True:
        for number in reader.recv(64):
            if number == _LAUNCHER_DIED:
                _launcher_died()
            elif number in STOP_SIGNALS:
                _note(number)


def _note(number: int) -> None:
    if _ignoring:
        return
    if not _begun:
        # Connecting and loading may take minutes without reaching any boundary.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            announce(f"{name_of(number)}: ends before the first step, nothing to save")
        os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE)
    if _stopping is None:
        request_stop(number)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            announce(
                f"{name_of(number)}: saving at the next boundary, then leaving; send it again to "
                "quit immediately"
            )
    elif not under_launcher() or time.monotonic() - _first_at > _SAME_SIGNAL_SECONDS:
        announce(f"second signal ({name_of(number)}): quitting immediately, nothing more is saved")
        os._exit(128 + number)
