"""One request to an application and its answer, which is read as a client reads it: its head, then
piece after piece of its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatron_dcpo.runtime.asgi import App, ClientLeftError, Message, Receive, Send
from megatron_dcpo.serving.json_text import compact, error_body

Headers = list[tuple[bytes, bytes]]

STATUSES = range(200, 600)  # of an answer
_REPLACED = (b"content-length", b"accept-encoding", b"transfer-encoding")
_JSON = (b"content-type", b"application/json")
_RETRY_SECONDS = b"2"
_BLANK = b"\xef\xbb\xbf \t\r\n"  # before the first character of a body
# they are about a body as it came
_OF_A_BODY = frozenset(
    (
        *(b"content-length", b"content-encoding", b"transfer-encoding", b"etag"),
        *(b"content-md5", b"digest", b"content-digest", b"repr-digest", b"accept-ranges"),
    )
)


class UpstreamError(Exception):
    """An application has not given a whole answer, or one that cannot be read."""


class UpstreamReply:
    """The answer of an application, one message of which waits at a time. ``is_sent`` says that the
    application has sent all of it.
    """

    def __init__(self, content: bytes, receive: Receive) -> None:
        self.status = 0
        self.headers: Headers = []
        self.is_sent = False
        self._request: list[Message] = [_body_of(content, is_last=True)]
        self._from_client = receive
        self._has_left = False
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue(maxsize=1)
        self._kept: list[bytes] = []  # of the body, read and not given yet
        self._is_read = False

    async def run(self, app: App, scope: Message) -> None:
        """Let an application answer; what it raises is raised where the answer is read."""
        end: Exception = UpstreamError("the server ended in the middle of its answer")
        try:
            await app(scope, self._receive, self._send)
        except Exception as error:
            end = error
        if not self.is_sent:
            await self._messages.put(ClientLeftError() if self._has_left else end)

    async def _receive(self) -> Message:
        if self._request:
            return self._request.pop()
        message = await self._from_client()
        self._has_left |= message["type"] == "http.disconnect"
        return message

    async def _send(self, message: Message) -> None:
        if self.is_sent:
            return
        await self._messages.put(message)
        is_body = message["type"] == "http.response.body"
        self.is_sent = is_body and not message.get("more_body", False)

    async def begin(self) -> None:
        """Read the head. Raises :class:`UpstreamError`, or what the application has raised."""
        message = await self._next()
        self.status = message["status"]
        self.headers = [(name.lower(), value) for name, value in message.get("headers", ())]
        if self.status not in STATUSES:
            raise UpstreamError(f"the upstream answers with the status {self.status}")

    async def _next(self) -> Message:
        found = await self._messages.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def _piece(self) -> bytes:
        message = await self._next()
        if message["type"] != "http.response.body":
            return b""
        self._is_read = not message.get("more_body", False)
        return bytes(message.get("body", b""))

    def header(self, wanted: bytes) -> bytes:
        """Return the value of a header in small letters, nothing if there is none."""
        return next((value.lower() for name, value in self.headers if name == wanted), b"")

    def headers_of_changed(self) -> Headers:
        """Return the headers without those about the body, which is another one now."""
        return [one for one in self.headers if one[0] not in _OF_A_BODY]

    async def first_character(self, most: int) -> bytes:
        """Return the first character of the body, which stays to be read."""
        size = 0
        while not self._is_read:
            piece = await self._piece()
            self._kept.append(piece)
            if begun := piece.lstrip(_BLANK):
                return begun[:1]
            size = _counted(size + len(piece), most)
        return b""

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises as :meth:`begin`."""
        kept, self._kept = self._kept, []
        for piece in kept:
            yield piece
        while not self._is_read:
            yield await self._piece()

    async def whole(self, most: int) -> bytes:
        """Return the body. Raises as :meth:`begin`, and :class:`UpstreamError` for one of more than
        ``most`` bytes.
        """
        content = bytearray()
        async for piece in self.pieces():
            content += piece
            _counted(len(content), most)
        return bytes(content)


@asynccontextmanager
async def exchange(
    app: App, scope: Message, receive: Receive, content: bytes
) -> AsyncIterator[UpstreamReply]:
    """Send a request on with another body, and yield its answer when the head is there; what is not
    read of it ends. The answer is not compressed, so that it can be read.
    """
    headers = [one for one in scope["headers"] if one[0] not in _REPLACED]
    headers.append((b"accept-encoding", b"identity"))
    headers.append((b"content-length", str(len(content)).encode()))
    reply = UpstreamReply(content, receive)
    running = asyncio.create_task(reply.run(app, {**scope, "headers": headers}))
    try:
        await reply.begin()
        yield reply
    finally:
        if not reply.is_sent:
            running.cancel()
        await asyncio.wait((running,))


async def send_head(send: Send, status: int, headers: Headers) -> None:
    """Send the head of an answer."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Send, content: bytes, is_last: bool = True) -> None:
    """Send a piece of an answer."""
    message = _body_of(content, is_last)
    await send({**message, "type": "http.response.body"})


async def send_error(send: Send, status: int, words: str) -> None:
    """Answer with an error in the form of OpenAI's, and close the connection: of the request, a
    part may still be on its way.
    """
    content = compact(error_body(status, words))
    headers = [_JSON, (b"content-length", str(len(content)).encode()), (b"connection", b"close")]
    if status in (429, 503):
        headers.append((b"retry-after", _RETRY_SECONDS))
    await send_head(send, status, headers)
    await send_body(send, content)


def _body_of(content: bytes, is_last: bool) -> Message:
    return {"type": "http.request", "body": content, "more_body": not is_last}


def _counted(size: int, most: int) -> int:
    """Return a size. Raises :class:`UpstreamError` for one above ``most``."""
    if size > most:
        raise UpstreamError(f"the upstream's answer has more than {most} bytes")
    return size
