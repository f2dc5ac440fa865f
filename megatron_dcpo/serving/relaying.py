"""Requests and answers as the middleware and the forwarder pass them on, and their own errors."""

from __future__ import annotations

from megatron_dcpo.runtime.asgi import Message, Receive, Send
from megatron_dcpo.serving.exact_json import compact
from megatron_dcpo.serving.replies import error_body

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


def received(content: bytes, receive: Receive) -> Receive:
    """Return what gives a body that has been read, and after it what ``receive`` gives."""
    bodies: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return bodies.pop() if bodies else await receive()

    return receive_again


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
