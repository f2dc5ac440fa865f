"""The ASGI application behind the middleware of ``dcpo serve``: every request goes on to the
upstream, and its answer comes back byte by byte. The upstream's request ends when the client
leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
import time
from contextlib import suppress
from http.cookiejar import DefaultCookiePolicy

import httpx2

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.served_models import VERSIONED
from megatron_dcpo.serving.asgi import (
    ClientLeftError,
    Message,
    Receive,
    Send,
    UpstreamError,
    until_client_leaves,
    whole_body,
)

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
_OWN_VERSION = "/v1"  # which the clients' addresses end in


class Forward:
    """``url`` is the address of the upstream, usually ending in ``/v1``, which the ``/v1`` of the
    clients stands for. Other paths go to the address before its version.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.root = VERSIONED.sub("", self.url)
        # as errors name it: an address may hold a password
        self.named = re.sub(r"//[^/@]*@", "//", self.url)
        # a model answers when it is done: only the connection has a time-out
        timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_SECONDS
        )
        trusted = ssl.create_default_context()
        self.clients = []
        for _ in range(_POOLS):
            client = httpx2.AsyncClient(verify=trusted, timeout=timeout, limits=limits)
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
        content = await whole_body(receive)
        answering = asyncio.ensure_future(self._answer(scope, content, send))
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

    async def _answer(self, scope: Message, content: bytes, send: Send) -> None:
        """Send one request on, and its answer back. Raises :class:`UpstreamError`."""
        try:
            reply = await self._begun(scope, content)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise UpstreamError(f"{self.named} does not answer ({_named(error)})") from None
        try:
            headers = []
            for name, value in reply.headers.raw:
                if name.lower() not in _OF_THE_CONNECTION:
                    headers.append((name.lower(), value))
            await send(
                {"type": "http.response.start", "status": reply.status_code, "headers": headers}
            )
            async for piece in reply.aiter_raw():
                body = {"type": "http.response.body", "body": piece, "more_body": True}
                await send(body)
        except (httpx2.HTTPError, OSError) as error:
            raise UpstreamError(
                f"{self.named} ended in the middle of its answer ({_named(error)})"
            ) from None
        finally:
            await reply.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begun(self, scope: Message, content: bytes) -> httpx2.Response:
        """Return a reply of which the head is there. A connection that the upstream closes at the
        moment in which it is used again is replaced by a new one.
        """
        client = next(self.turns)
        request = client.build_request(
            scope["method"],
            self.address(scope),
            headers=[h for h in scope["headers"] if h[0].lower() not in _OURS],
            content=content or None,
        )
        begun = time.monotonic()
        try:
            return await client.send(request, stream=True)
        except (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError):
            if time.monotonic() - begun > _STALE_SECONDS:
                raise
            return await client.send(request, stream=True)

    def address(self, scope: Message) -> str:
        """Return the upstream's address for a request."""
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        if path.startswith(f"{_OWN_VERSION}/"):
            url = self.url + path.removeprefix(_OWN_VERSION)
        else:
            url = self.root + path
        query = scope.get("query_string", b"").decode("latin-1")
        return f"{url}?{query}" if query else url


def _named(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)
