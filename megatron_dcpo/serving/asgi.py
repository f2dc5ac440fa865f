"""The part of ASGI that the middleware and the forwarder share: bodies, errors, clients that
leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_dcpo.serving.exact_json import compact
from megatron_dcpo.serving.replies import error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_REPLACED = (b"content-length", b"accept-encoding", b"transfer-encoding")
_JSON = (b"content-type", b"application/json")
_RETRY_SECONDS = b"2"
# they are about a body as it came
_OF_A_BODY = frozenset(
    (
        *(b"content-length", b"content-encoding", b"transfer-encoding", b"etag"),
        *(b"content-md5", b"digest", b"content-digest", b"repr-digest", b"accept-ranges"),
    )
)


class UpstreamError(Exception):
    """The upstream cannot be reached, or has ended in the middle of a reply; ``status`` is what a
    request is answered with then.
    """

    status = 502


class ClientLeftError(Exception):
    """The client has gone before its answer was complete."""


class BadRequestError(Exception):
    """A request cannot be read; ``status`` is what it is answered with."""

    def __init__(self, words: str, status: int = 400) -> None:
        super().__init__(words)
        self.status = status


async def whole_body(receive: Receive, most: int, seconds: float) -> bytes:
    """Return the body of a request. Raises :class:`ClientLeftError`, and :class:`BadRequestError`
    for one of more than ``most`` bytes, and for one that takes longer than ``seconds``.
    """
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


def received(content: bytes, receive: Receive) -> Receive:
    """Return what gives a body that has been read, and after it what ``receive`` gives."""
    bodies: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return bodies.pop() if bodies else await receive()

    return receive_again


async def until_client_leaves(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def request_of(scope: Message, content: bytes) -> tuple[Message, Message]:
    """Return the scope of a request, and the message of its body, with another body. The answer to
    it is not compressed, so that it can be read.
    """
    headers = []
    for name, value in scope["headers"]:
        if name not in _REPLACED:
            headers.append((name, value))
    headers.append((b"accept-encoding", b"identity"))
    headers.append((b"content-length", str(len(content)).encode()))
    body = {"type": "http.request", "body": content, "more_body": False}
    return {**scope, "headers": headers}, body


def headers_of_changed(start: Message) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer whose body is changed, without those about the body."""
    headers = start.get("headers", ())
    return [(name, value) for name, value in headers if name.lower() not in _OF_A_BODY]


async def send_error(send: Send, status: int, words: str) -> None:
    """Answer with an error in the form of OpenAI's, and close the connection: of the request, a
    part may still be on its way.
    """
    content = compact(error_body(status, words))
    headers = [_JSON, (b"content-length", str(len(content)).encode()), (b"connection", b"close")]
    if status in (429, 503):
        headers.append((b"retry-after", _RETRY_SECONDS))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
