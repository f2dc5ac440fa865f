"""The server of ``dcpo serve``: uvicorn, whose connections have time-outs and whose end is orderly.

Uvicorn waits without end for the head of a request, and for clients that do not read; it raises the
signal that has ended it once more.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_dcpo.runtime.asgi import App
from megatron_dcpo.serving.ending import Shutdown

# for the words that a request under way is told when the server ends
_LAST_SECONDS = 2


@dataclass(frozen=True)
class Timeouts:
    """Seconds for the head of a request, and for a client to go on reading its answer."""

    head: float = 20.0
    reading: float = 120.0
    idle: int = 5


class _Timed:
    """A connection that is closed if no complete head of a request comes in time, or if its client
    does not read.
    """

    timeouts = Timeouts()
    _head: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 -- of uvicorn
        super().connection_made(transport)  # type: ignore[misc]
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._head)
        _stop(self._reading)
        super().connection_lost(exc)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        super().data_received(data)  # type: ignore[misc]
        if self._is_answering():
            _stop(self._head)
            self._head = None
        elif self._head is None:
            self._wait_for_head()

    def pause_writing(self) -> None:
        super().pause_writing()  # type: ignore[misc]
        if self._reading is None:
            self._reading = _later(self.timeouts.reading, self._abort)

    def resume_writing(self) -> None:
        _stop(self._reading)
        self._reading = None
        super().resume_writing()  # type: ignore[misc]

    def _wait_for_head(self) -> None:
        self._head = _later(self.timeouts.head, self._close_if_idle)

    def _is_answering(self) -> bool:
        cycle = getattr(self, "cycle", None)
        return cycle is not None and not cycle.response_complete

    def _close_if_idle(self) -> None:
        self._head = None
        if not self._is_answering():
            self._abort()

    def _abort(self) -> None:
        self.transport.abort()  # type: ignore[attr-defined]


def _later(seconds: float, call: Any) -> asyncio.TimerHandle:  # noqa: ANN401 -- a method
    return asyncio.get_running_loop().call_later(seconds, call)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class TimedHttpTools(_Timed, HttpToolsProtocol):
    """Reads requests with httptools, which understands less than h11 and says less of the target:
    it is handed on as the client wrote it.
    """

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if "raw_path" in self.scope:
            self.scope["raw_path"] = self.url.partition(b"?")[0]


class TimedH11(_Timed, H11Protocol):
    """Reads requests with h11."""


class ProxyServer(uvicorn.Server):
    """Ends at the first SIGTERM or SIGINT, after ``grace`` seconds at the latest, without an error;
    at the second SIGINT at once.
    """

    def __init__(self, config: uvicorn.Config, ending: Shutdown, grace: float) -> None:
        super().__init__(config)
        self.ending = ending
        self.grace = grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.ending.begin(self.grace)
        await super().shutdown(sockets)


def server_of(
    app: App,
    ending: Shutdown,
    grace: float,
    timeouts: Timeouts | None = None,
    parser: type[_Timed] = TimedHttpTools,
) -> ProxyServer:
    """Return a server of an application."""
    protocol = type(parser.__name__, (parser,), {"timeouts": timeouts or Timeouts()})
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=protocol,
        ws="none",
        log_level="error",
        access_log=False,
        proxy_headers=False,
        # the answers have the upstream's headers
        server_header=False,
        date_header=False,
        timeout_keep_alive=protocol.timeouts.idle,  # type: ignore[attr-defined]
        timeout_graceful_shutdown=round(grace) + _LAST_SECONDS,
    )
    return ProxyServer(config, ending, grace)


PARSERS: Sequence[type[_Timed]] = (TimedHttpTools, TimedH11)
