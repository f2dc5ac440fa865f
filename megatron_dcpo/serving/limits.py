"""How much of everything is taken, and for how long it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dcpo.serving.asgi import Message, Receive

LONGEST_ID = 256  # characters of the id of an answer that is remembered
_MB = 1 << 20


@dataclass(frozen=True)
class ServeLimits:
    """``request_bytes``, ``reply_bytes`` and ``event_bytes`` are those of one body, one answer that
    is read, and one event of a stream. ``body_seconds`` is the time for a request's body.
    ``concurrent`` requests are passed on at a time and ``waiting`` wait; ``held_bytes`` is the size
    of all bodies, whole or not, whose requests are not answered.
    """

    request_bytes: int = 16 * _MB
    reply_bytes: int = 32 * _MB
    event_bytes: int = 16 * _MB
    feedback_bytes: int = 64 << 10
    body_seconds: float = 60.0
    concurrent: int = 512
    waiting: int = 1024
    held_bytes: int = 512 * _MB


class TooManyError(Exception):
    """There are as many requests as are passed on at a time and may wait."""


class Gate:
    """Lets a limited number of requests through at a time, and a limited number wait."""

    def __init__(self, limits: ServeLimits) -> None:
        self.limits = limits
        self.present = 0
        self.held_bytes = 0
        self._free = asyncio.Semaphore(limits.concurrent)

    @asynccontextmanager
    async def admitted(self, receive: Receive) -> AsyncIterator[Receive]:
        """Count a request from its head to its end, and its body as it comes: yield what gives the
        body. Raises :class:`TooManyError`, as does what is yielded.
        """
        limits = self.limits
        if self.present >= limits.concurrent + limits.waiting:
            raise TooManyError("too many requests wait; ask again later")
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            grown = len(message.get("body", b""))
            if self.held_bytes + grown > limits.held_bytes:
                raise TooManyError("the requests that wait are too large; ask again later")
            size += grown
            self.held_bytes += grown
            return message

        self.present += 1
        try:
            yield counted
        finally:
            self.present -= 1
            self.held_bytes -= size

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Wait for a place for a request whose body has come."""
        async with self._free:
            yield
