"""What a client's requests to a server pass, so that weights can arrive while they are under way.

No request is sent while weights are replaced, and none is under way then: those that were have come
back with what was sampled so far, and are sent again, behind it, when the weights are whole.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_dcpo.rollout.engine import EngineError

# A request that comes to a server after it was paused is held there. After so many seconds in which
# no other has come back, it is taken back: nothing of it has been sampled.
_QUIET_SECONDS = 2.0
_LOOK_SECONDS = 0.5


class Withdrawal:
    """How a request is taken back: for good, or from the server only, to be sent again."""

    def __init__(self) -> None:
        self.is_final = False
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @contextmanager
    def attempt(self) -> Iterator[threading.Event]:
        """Yield what ends the attempt that is made in the block."""
        with self._lock:
            self._stop = threading.Event()
            if self.is_final:
                self._stop.set()
        yield self._stop

    def set(self) -> None:
        """Take the request back for good."""
        with self._lock:
            self.is_final = True
            self._stop.set()

    def send_again(self) -> None:
        """End the attempt that is under way."""
        with self._lock:
            self._stop.set()

    @property
    def is_sent_again(self) -> bool:
        """Return whether the last attempt was ended, and another one is to follow."""
        return self._stop.is_set() and not self.is_final


class Gate:
    """Lets requests pass while it is open, and knows which are under way."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._failure = ""
        self._inside: set[Withdrawal] = set()

    @property
    def is_open(self) -> bool:
        """Return whether no weights arrive."""
        return self._is_open

    @property
    def under_way(self) -> int:
        """Return the number of requests under way."""
        return len(self._inside)

    @contextmanager
    def passing(self, request: Withdrawal) -> Iterator[None]:
        """Open a block in which the weights stay as they are; wait for it while weights arrive.

        Raises :class:`EngineError` if they could not, or if the request is taken back meanwhile.
        """
        with self._changed:
            while not (self._is_open or self._failure or request.is_final):
                self._changed.wait(_LOOK_SECONDS)
            if not self._is_open:
                raise EngineError(self._failure or "the request was withdrawn")
            self._inside.add(request)
        try:
            yield
        finally:
            with self._changed:
                self._inside.discard(request)
                self._changed.notify_all()

    def close(self) -> None:
        """Let nothing pass from now on."""
        with self._changed:
            self._is_open = False

    def wait_until_empty(self) -> None:
        """Wait for what is under way, to servers that are paused."""
        with self._changed:
            while self._inside:
                before = len(self._inside)
                self._changed.wait(_QUIET_SECONDS)
                if len(self._inside) == before:
                    for request in self._inside:
                        request.send_again()

    def open(self) -> None:
        """Let requests pass."""
        with self._changed:
            self._is_open = True
            self._failure = ""
            self._changed.notify_all()

    def fail(self, why: BaseException) -> None:
        """Refuse what waits, and all that comes until :meth:`open`: the weights did not arrive."""
        with self._changed:
            self._failure = f"the weights did not arrive: {why}"
            self._changed.notify_all()
