"""How much of everything is taken, and for how long it is waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from megatron_dcpo.runtime.asgi import BadRequestError, Message, Receive

_MB = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """``request_bytes`` and ``reply_bytes`` are those of one body and one answer that is read, or
    of one event of a stream. ``body_seconds`` is the time for a request's body. ``concurrent``
    requests are answered at a time; ``held_bytes`` is the size of all their bodies, whole or not.
    """

    request_bytes: int = 16 * _MB
    reply_bytes: int = 32 * _MB
    body_seconds: float = 60.0
    concurrent: int = 1024
    held_bytes: int = 512 * _MB


class Gate:
    """Lets a limited number of requests in at a time, with limited bodies."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.present = 0
        self.held_bytes = 0

    @asynccontextmanager
    async def admitted(self, receive: Receive) -> AsyncIterator[Receive]:
        """Count a request from its head to its end, and its body as it comes: yield what gives the
        body. Raises :class:`BadRequestError` for one too many, as does what is yielded.
        """
        if self.present >= self.bounds.concurrent:
            raise BadRequestError("too many requests; ask again later", 429)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            grown = len(message.get("body", b""))
            if self.held_bytes + grown > self.bounds.held_bytes:
                raise BadRequestError("the requests are too large; ask again later", 429)
            size += grown
            self.held_bytes += grown
            return message

        self.present += 1
        try:
            yield counted
        finally:
            self.present -= 1
            self.held_bytes -= size
