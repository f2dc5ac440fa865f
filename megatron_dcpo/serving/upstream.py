"""The ASGI application behind the middleware of ``dcpo serve``: a request goes on to the upstream,
and its answer comes back. The upstream's request ends when the client leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from http.cookiejar import DefaultCookiePolicy

import httpx2

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.asgi import Message, Receive, Send, until_client_leaves, whole_body
from megatron_dcpo.runtime.http_json import without_password
from megatron_dcpo.runtime.served_models import VERSIONED
from megatron_dcpo.serving.exchange import STATUSES, Headers, send_body, send_error, send_head

# they are about one connection, not about what travels over it
_OF_THE_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
_OURS = _OF_THE_CONNECTION | {b"host", b"content-length", b"expect"}
_CONNECT_SECONDS = 10.0
# a pool looks at all its connections for each request: many small ones are cheaper
_POOLS = 32
_IDLE_SECONDS = 4.0  # less than the 5 after which uvicorn closes a connection
_OWN_VERSION = "/v1"  # which the clients' addresses end in
_DECODED = frozenset(("", "identity", "gzip", "deflate", "br", "zstd"))  # by httpx2
_UNREACHABLE = 502


class Upstream:
    """``url`` is the address of the upstream, usually ending in ``/v1``, which the ``/v1`` of the
    clients stands for; other paths go to the address before its version. ``api_key`` is sent
    instead of the client's, None for the client's. A request has at most ``most`` bytes, which come
    within ``seconds``.
    """

    def __init__(self, url: str, most: int, seconds: float, api_key: str | None = None) -> None:
        self.most = most
        self.seconds = seconds
        self.api_key = api_key
        self.url = httpx2.URL(url.rstrip("/"))
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

    @asynccontextmanager
    async def living(self, app: object) -> AsyncIterator[None]:
        """Keep the connections while an application lives."""
        yield
        for client in self.clients:
            await client.aclose()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        content = b""
        if scope["method"] == "POST":
            content = await whole_body(scope, receive, self.most, self.seconds)
        answering = asyncio.ensure_future(self._answer(scope, content, send))
        leaving = asyncio.ensure_future(until_client_leaves(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()
            with suppress(asyncio.CancelledError):
                await answering

    async def _answer(self, scope: Message, content: bytes, send: Send) -> None:
        """Send one request on, and its answer back, decoded if it is compressed. An answer that
        breaks off is left without an end.
        """
        client = next(self.turns)
        try:
            url = self.address(scope["path"], scope.get("query_string", b""))
            request = client.build_request(
                scope["method"], url, headers=self._headers(scope), content=content or None
            )
            reply = await client.send(request, stream=True)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, UnicodeError) as error:
            words = one_line(f"{type(error).__name__}: {error}", 300)
            await send_error(send, _UNREACHABLE, f"{self.named} does not answer ({words})")
            return
        try:
            if problem := _problem_of(reply):
                await send_error(send, _UNREACHABLE, f"{self.named} {problem}")
                return
            await send_head(send, reply.status_code, _headers_of(reply))
            with suppress(httpx2.HTTPError, OSError):
                async for piece in reply.aiter_bytes():
                    await send_body(send, piece, is_last=False)
                await send_body(send, b"")
        finally:
            await reply.aclose()

    def _headers(self, scope: Message) -> Headers:
        """Return the headers of a request as they go to the upstream."""
        ours = set(_OURS)
        for name, value in scope["headers"]:
            if name == b"connection":
                ours |= {one.strip().lower() for one in value.split(b",")}
        if self.api_key is not None:
            ours.add(b"authorization")
        headers = [(name, value) for name, value in scope["headers"] if name not in ours]
        if self.api_key is not None:
            headers.append((b"authorization", b"Bearer " + self.api_key.encode()))
        return headers

    def address(self, path: str, query: bytes) -> httpx2.URL:
        """Return the upstream's address for one of the paths that are passed on."""
        version = self.url.raw_path.decode().rstrip("/")
        if path.startswith(_OWN_VERSION):
            path = version + path.removeprefix(_OWN_VERSION)
        else:
            path = VERSIONED.sub("", version) + path
        raw_path = path.encode() + b"?" + query if query else path.encode()
        return self.url.copy_with(raw_path=raw_path)


def _problem_of(reply: httpx2.Response) -> str:
    """Return why a reply is not passed on, "" if it is. Whoever follows a redirect leaves this
    server.
    """
    if reply.has_redirect_location:
        return "redirects, which is not followed: --endpoint has to be the address itself"
    if reply.status_code not in STATUSES:
        return f"answers with the status {reply.status_code}"
    return ""


def _headers_of(reply: httpx2.Response) -> Headers:
    """Return the headers of a reply as they go to the client; what has been decoded is neither
    compressed nor of that length any more.
    """
    codings = reply.headers.get("content-encoding", "").lower().split(",")
    left_out = set(_OF_THE_CONNECTION)
    if any(codings) and {one.strip() for one in codings} <= _DECODED:
        left_out |= {b"content-encoding", b"content-length"}
    headers = [(name.lower(), value) for name, value in reply.headers.raw]
    return [(name, value) for name, value in headers if name not in left_out]
