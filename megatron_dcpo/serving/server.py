"""The server of ``dcpo serve``: uvicorn, whose connections have time-outs.

Uvicorn waits without end for the head of a request, and for clients that do not read; it raises the
signal that has ended it once more.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_dcpo.runtime.asgi import App

# in which requests that are cancelled tell their clients
_LAST_SECONDS = 2


@dataclass(frozen=True)
class Timeouts:
    """Seconds for the head of a request, and for a client to go on reading its answer."""

    head: float = 20.0
    reading: float = 120.0
    idle: int = 5


class TimedProtocol(HttpToolsProtocol):
    """A connection that is closed if no complete head of a request comes in time, or if its client
    does not read.
    """

    timeouts = Timeouts()
    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 -- of uvicorn
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._head)
        _stop(self._reading)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering():
            _stop(self._head)
            self._head = None
        elif self._head is None:
            self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reading is None:
            self._reading = _later(self.timeouts.reading, self._abort)

    def resume_writing(self) -> None:
        _stop(self._reading)
        self._reading = None
        super().resume_writing()

    def _wait_for_head(self) -> None:
        self._head = _later(self.timeouts.head, self._close_if_idle)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _close_if_idle(self) -> None:
        self._head = None
        if not self._is_answering():
            self._abort()

    def _abort(self) -> None:
        self.transport.abort()


def _later(seconds: float, call: Any) -> asyncio.TimerHandle:  # noqa: ANN401 -- a method
    return asyncio.get_running_loop().call_later(seconds, call)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class QuietServer(uvicorn.Server):
    """Ends at the first SIGTERM or SIGINT without an error; at the second SIGINT at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if tasks := list(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=_LAST_SECONDS)


def server_of(app: App, grace: int, timeouts: Timeouts | None = None) -> QuietServer:
    """Return a server of an application, which at its end waits ``grace`` seconds for answers under
    way, and then cancels them.
    """
    chosen = timeouts or Timeouts()
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=type("Timed", (TimedProtocol,), {"timeouts": chosen}),
        ws="none",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        # the answers have the upstream's headers
        server_header=False,
        date_header=False,
        timeout_keep_alive=chosen.idle,
        timeout_graceful_shutdown=grace,
    )
    return QuietServer(config)
