"""What the servers of this package share of ASGI: its types, and the body of a request, read within
bounds of size and time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class ClientLeftError(Exception):
    """The client has gone before its answer was complete."""


class BadRequestError(Exception):
    """A request cannot be read; ``status`` is what it is answered with."""

    def __init__(self, words: str, status: int = 400) -> None:
        super().__init__(words)
        self.status = status


async def whole_body(scope: Message, receive: Receive, most: int, seconds: float) -> bytes:
    """Return the body of a request. Raises :class:`ClientLeftError`, and :class:`BadRequestError`
    for one of more than ``most`` bytes, for one that takes longer than ``seconds``, and for one
    that is compressed: what it unpacks to would have no limit.
    """
    coding = dict(scope["headers"]).get(b"content-encoding", b"identity").decode("latin-1")
    if coding.strip().lower() not in ("", "identity"):
        raise BadRequestError(f"Content-Encoding {coding}: send the body as it is", 415)
    try:
        async with asyncio.timeout(seconds):
            return await _body(receive, most)
    except TimeoutError:
        raise BadRequestError("the body takes too long", 408) from None


async def _body(receive: Receive, most: int) -> bytes:
    pieces = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most:
            raise BadRequestError(f"the body has more than {most} bytes", 413)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def until_client_leaves(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
