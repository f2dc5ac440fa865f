"""The ASGI application behind the middleware of ``dcpo serve``: every request goes on to the
upstream, and its answer comes back byte by byte. The upstream's request ends when the client
leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from contextlib import suppress
from http.cookiejar import DefaultCookiePolicy

import httpx2

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.asgi import (
    ClientLeftError,
    Message,
    Receive,
    Send,
    until_client_leaves,
    whole_body,
)
from megatron_dcpo.runtime.http_json import without_password
from megatron_dcpo.runtime.served_models import VERSIONED
from megatron_dcpo.serving.asking import PATHS
from megatron_dcpo.serving.limits import ServeLimits
from megatron_dcpo.serving.relaying import UpstreamError, headers_of_changed
from megatron_dcpo.serving.targets import checked_target

# they are about one connection, not about what travels over it
_OF_THE_CONNECTION = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_OURS = _OF_THE_CONNECTION | {b"host", b"content-length", b"expect"}
_CONNECT_SECONDS = 10.0
# a pool looks at all its connections for each request: many small ones are cheaper
_POOLS = 32
_IDLE_SECONDS = 4.0  # less than the 5 after which uvicorn closes a connection
_STALE_SECONDS = 1.0  # within which the use of a closed connection fails
_GROWTH = 6  # of a body that was read, and written again in ASCII
_OWN_VERSION = b"/v1"  # which the clients' addresses end in
_DECODED = frozenset(("", "identity", "gzip", "deflate", "br", "zstd"))  # by httpx2


class Forward:
    """``url`` is the address of the upstream, usually ending in ``/v1``, which the ``/v1`` of the
    clients stands for. Other paths go to the address before its version. ``api_key`` is sent
    instead of the client's, None for the client's.
    """

    def __init__(
        self, url: str, limits: ServeLimits | None = None, api_key: str | None = None
    ) -> None:
        self.limits = limits or ServeLimits()
        self.api_key = api_key
        self.url = httpx2.URL(url.rstrip("/"))
        self.version_path = self.url.raw_path.rstrip(b"/")
        self.root_path = VERSIONED.sub("", self.version_path.decode()).encode()
        self.named = without_password(url.rstrip("/"))
        # a model answers when it is done: only the connection has a time-out
        timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
        pool = httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS
        )
        trusted = ssl.create_default_context()
        self.clients = []
        for _ in range(_POOLS):
            client = httpx2.AsyncClient(verify=trusted, timeout=timeout, limits=pool)
            # what one client of ours gets or sends is nothing to another one
            client.headers.clear()
            client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))
            self.clients.append(client)
        self.turns = itertools.cycle(self.clients)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._pass_on(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for client in self.clients:
            await client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _pass_on(self, scope: Message, receive: Receive, send: Send) -> None:
        """Send a request on until the client leaves. Raises :class:`ClientLeftError` then,
        :class:`BadRequestError` and :class:`UpstreamError`.
        """
        target = self.address(scope)
        most = self.limits.request_bytes
        if scope["path"] in PATHS:
            most *= _GROWTH
        content = await whole_body(receive, most, self.limits.body_seconds)
        answering = asyncio.ensure_future(self._answer(scope, target, content, send))
        leaving = asyncio.ensure_future(until_client_leaves(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not answering.done():
                answering.cancel()
                with suppress(asyncio.CancelledError):
                    await answering
        if answering.cancelled():
            raise ClientLeftError
        answering.result()

    async def _answer(self, scope: Message, target: httpx2.URL, content: bytes, send: Send) -> None:
        """Send one request on, and its answer back; one that is compressed is decoded if it is read
        on its way. Raises :class:`UpstreamError`.
        """
        try:
            reply = await self._begun(scope, target, content)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise UpstreamError(f"{self.named} does not answer ({_named(error)})") from None
        try:
            start = _start_of(reply)
            pieces = reply.aiter_raw()
            if scope["path"] in PATHS and _is_decoded(reply):
                start["headers"] = headers_of_changed(start)
                pieces = reply.aiter_bytes()
            await send(start)
            async for piece in pieces:
                body = {"type": "http.response.body", "body": piece, "more_body": True}
                await send(body)
        except (httpx2.HTTPError, OSError) as error:
            raise UpstreamError(
                f"{self.named} ended in the middle of its answer ({_named(error)})"
            ) from None
        finally:
            await reply.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begun(self, scope: Message, target: httpx2.URL, content: bytes) -> httpx2.Response:
        """Return a reply of which the head is there. A connection that the upstream closes at the
        moment in which it is used again is replaced by a new one.
        """
        client = next(self.turns)
        request = client.build_request(
            scope["method"],
            target,
            headers=self._headers(scope),
            content=content or None,
        )
        begun = time.monotonic()
        try:
            return await client.send(request, stream=True)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            if time.monotonic() - begun > _STALE_SECONDS:
                raise
            return await client.send(request, stream=True)

    def _headers(self, scope: Message) -> list[tuple[bytes, bytes]]:
        """Return the headers of a request as they go to the upstream."""
        ours = set(_OURS)
        for name, value in scope["headers"]:
            if name == b"connection":
                ours |= {one.strip().lower() for one in value.split(b",")}
        headers = [(name, value) for name, value in scope["headers"] if name not in ours]
        if self.api_key is not None:
            headers = [one for one in headers if one[0] != b"authorization"]
            headers.append((b"authorization", b"Bearer " + self.api_key.encode()))
        return headers

    def address(self, scope: Message) -> httpx2.URL:
        """Return the upstream's address for a request: its own scheme, host and port, whatever the
        client asks for. Raises :class:`BadRequestError`.
        """
        path, query = checked_target(scope)
        if path.startswith(_OWN_VERSION + b"/"):
            path = self.version_path + path.removeprefix(_OWN_VERSION)
        else:
            path = self.root_path + path
        return self.url.copy_with(raw_path=path + b"?" + query if query else path)


def _start_of(reply: httpx2.Response) -> Message:
    headers = []
    for name, value in reply.headers.raw:
        if name.lower() not in _OF_THE_CONNECTION:
            headers.append((name.lower(), value))
    return {"type": "http.response.start", "status": reply.status_code, "headers": headers}


def _is_decoded(reply: httpx2.Response) -> bool:
    """Return whether a reply is compressed in a way that can be undone."""
    codings = reply.headers.get("content-encoding", "").lower().split(",")
    known = {coding.strip() for coding in codings} <= _DECODED
    return known and any(coding.strip() not in ("", "identity") for coding in codings)


def _named(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)
