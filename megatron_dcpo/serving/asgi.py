"""The part of ASGI that the middleware and the forwarder share: bodies, errors, clients that
leave.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from megatron_dcpo.serving.replies import compact, error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_MOST_BYTES = 64 << 20  # of a request
_REPLACED = (b"content-length", b"accept-encoding", b"transfer-encoding")
_JSON = (b"content-type", b"application/json")


class UpstreamError(Exception):
    """The upstream cannot be reached, or has ended in the middle of a reply."""


class ClientLeftError(Exception):
    """The client has gone before its answer was complete."""


class BadRequestError(Exception):
    """A request cannot be read; ``status`` is what it is answered with."""

    def __init__(self, words: str, status: int = 400) -> None:
        super().__init__(words)
        self.status = status


async def whole_body(receive: Receive) -> bytes:
    """Return the body of a request. Raises :class:`ClientLeftError`, and :class:`BadRequestError`
    for one that is too large."""
    pieces = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > _MOST_BYTES:
            words = f"the body has more than {_MOST_BYTES >> 20} MB"
            raise BadRequestError(words, 413)
        if not message.get("more_body", False):
            return b"".join(pieces)


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


async def send_error(send: Send, status: int, words: str) -> None:
    """Answer with an error in the form of OpenAI's."""
    content = compact(error_body(status, words))
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [_JSON, length]})
    await send({"type": "http.response.body", "body": content})
