"""Send JSON over HTTP with retries, for every server that this package uses. Imports no torch.

A server may answer with anything, at any speed: what is read of it, and for how long, is bounded.
All requests of a process run in one event loop, in a thread, and share its connections.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import random
import re
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx2

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.text import parse_json, printable

logger = logging.getLogger(__name__)
T = TypeVar("T")
# They write a line for each request, and at DEBUG the headers of replies, which may repeat a key.
for _name in ("httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.WARNING)

# The statuses below 500 after which a request is repeated.
_PASSING = frozenset({408, 409, 425, 429})
# The server does not know the method, the version of HTTP or the extension: it never will.
_LASTING = frozenset({501, 505, 510})
_REDIRECTS = range(300, 400)
_WORDS = 500  # characters of an error's body that are reported
_MOST_WORDS = 16 << 10  # bytes of it that are read
_WORDS_SECONDS = 10  # in which they are read
_LOST_SECONDS = 120  # without an answer of the host's kernel
_LOOK_SECONDS = 0.5  # between two looks at whether the reply is still wanted
# An idle connection is kept for a shorter time than servers keep theirs (vLLM: 5 s).
_IDLE_SECONDS = 2.0


def without_password(url: str) -> str:
    """Return an address as a line may name it: without the user and the password in it."""
    return re.sub(r"//[^/]*@", "//", url)


class HttpError(Exception):
    """There is no usable answer. ``status`` is the HTTP status that refused the request, None if no
    attempt was answered. ``unreachable`` says that nobody accepted the connection of the last one.
    """

    def __init__(self, message: str, status: int | None = None, unreachable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.unreachable = unreachable


def may_pass(status: int) -> bool:
    """Return whether a request with that HTTP status is worth repeating: the server, or a proxy in
    front of it (520 to 530, 529), is busy or broken for a while.
    """
    return status in _PASSING or (status >= 500 and status not in _LASTING)


@dataclass(frozen=True)
class JsonClient:
    """Requests to the server at ``url``. Thread-safe.

    A request is repeated if it fails in a way that may pass: no connection, a time-out, a status
    that :func:`may_pass`, a reply that is not JSON. There are at most ``attempts``, with pauses
    that double from ``first_pause`` to ``longest_pause`` seconds, or last as long as
    ``Retry-After`` demands.
    ``timeout`` is the number of seconds of one attempt, to the last byte of the reply. A reply of
    more than ``max_reply_bytes`` is refused, and so is a redirect, because ``api_key`` and the
    request are for ``url`` alone. No ``repr`` and no error shows the key. Without
    ``through_proxy`` the proxies of the environment are left out, which cannot resolve the nodes of
    a job; and a host that is lost ends a request, however long that may take, after _LOST_SECONDS.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    attempts: int = 1
    first_pause: float = 0.5
    longest_pause: float = 60.0
    max_reply_bytes: int = 64 << 20
    through_proxy: bool = True

    def __post_init__(self) -> None:
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise HttpError(
                "the API key holds a line break or another character that a header cannot hold"
            )

    def call(
        self,
        path: str,
        body: object = None,
        *,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        problem: Callable[[Any], str] = lambda reply: "",
    ) -> Any:  # noqa: ANN401 - JSON of any shape
        """Return the parsed reply to a POST of ``body``, or to a GET without a body; an empty reply
        is ``{}``.

        ``stop`` ends the request, or the pause after it, when it is set: the connection is closed,
        by which a server sees that nobody waits for its reply. ``problem`` returns the reason to
        repeat the request after a reply, "" if the reply is good, and raises :class:`HttpError` if
        repeating it is of no use. Raises :class:`HttpError`.
        """
        stop = stop or threading.Event()
        reason = ""
        unreachable = False
        for attempt in range(self.attempts):
            longest = min(self.longest_pause, self.first_pause * 2.0**attempt)
            pause = longest * random.uniform(0.5, 1.0)
            unreachable = False
            try:
                reply = self._once(path, body, timeout or self.timeout, stop)
                reason = self.without_key(problem(reply))[:_WORDS]
                if not reason:
                    return reply
            except HttpError as error:
                words = self.without_key(str(error))[:_WORDS]
                raise HttpError(words, error.status) from None
            except httpx2.HTTPStatusError as error:
                reason = str(error)
                status = error.response.status_code
                if not may_pass(status):
                    raise HttpError(reason, status) from None
                after = error.response.headers.get("Retry-After", "").strip()
                if after.isdecimal():  # its other form, a date, is ignored
                    pause = min(self.longest_pause, float(after))
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
                words = self.without_key(one_line(error))[:_WORDS]
                reason = f"{type(error).__name__}: {words}"
                unreachable = isinstance(error, httpx2.ConnectError)
            if attempt + 1 < self.attempts:
                logger.debug("%s%s: %s; trying again", without_password(self.url), path, reason)
                if stop.wait(pause):
                    break
        raise HttpError(reason, unreachable=unreachable)

    def without_key(self, text: str, lines: bool = False) -> str:
        """Return printable ``text`` of the server without the key, which the server knows and may
        repeat; with ``lines``, newlines and tabs stay.

        Text is cut afterwards: of a key that is cut before, a part would be left.
        """
        if self.api_key:
            text = text.replace(self.api_key, "***")
            # as it stands in JSON and in Python's texts
            text = text.replace(json.dumps(self.api_key)[1:-1], "***")
        return printable(text, lines=lines)

    def _once(self, path: str, body: object, timeout: float, stop: threading.Event) -> Any:  # noqa: ANN401 - JSON
        """Return the parsed reply to one request. Raises HTTPStatusError, with our text, for any
        status but 2xx, TimeoutError after ``timeout`` seconds.
        """
        exchange = _in_time(self._exchange(path, body), timeout, stop)
        text = _network().result_of(exchange)
        if not text.strip():
            return {}
        return parse_json(text)

    async def _exchange(self, path: str, body: object) -> bytes:
        """Send one request and return the body of the reply to it."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        method = "GET"
        content = None
        if body is not None:
            method = "POST"
            content = json.dumps(body).encode()
        client = _network().client(self.through_proxy)
        address = self.url.rstrip("/") + path
        async with client.stream(method, address, headers=headers, content=content) as reply:
            if not reply.is_success:
                words = await self._refusal(path, reply)
                raise httpx2.HTTPStatusError(words, request=reply.request, response=reply)
            text = await _read(reply, self.max_reply_bytes + 1)
        if len(text) > self.max_reply_bytes:
            raise HttpError(f"a reply of more than {self.max_reply_bytes >> 20} MB")
        return text

    async def _refusal(self, path: str, reply: httpx2.Response) -> str:
        """Return the status and the first words of a reply that refuses the request."""
        if reply.status_code in _REDIRECTS:
            there = self.without_key(one_line(reply.headers.get("Location")))[:_WORDS]
            return (
                f"{without_password(self.url)}{path} redirects to {there}; redirects are not "
                "followed, name the address itself"
            )
        try:
            async with asyncio.timeout(_WORDS_SECONDS):
                words = (await _read(reply, _MOST_WORDS)).decode(errors="replace")
        except (httpx2.HTTPError, OSError) as unread:
            words = type(unread).__name__
        # a key at the end of what was read would be cut: it is beyond what is shown
        words = self.without_key(one_line(words))[:_WORDS]
        return f"HTTP {reply.status_code} {words}".strip()


async def _read(reply: httpx2.Response, most: int) -> bytes:
    """Return the first ``most`` bytes of the body as they were sent; decompressed, there could be
    any number.
    """
    text = bytearray()
    async for piece in reply.aiter_raw():
        text += piece
        if len(text) >= most:
            break
    return bytes(text[:most])


async def _in_time(exchange: Coroutine[Any, Any, T], seconds: float, stop: threading.Event) -> T:
    """Return the result of an exchange that is cancelled after ``seconds``, or by ``stop``.

    A time-out of httpx2 is that of each read: a server that sends a byte now and then never reaches
    it.
    """
    task = asyncio.ensure_future(exchange)
    try:
        async with asyncio.timeout(seconds):
            while not task.done():
                if stop.is_set():
                    raise HttpError("the request was withdrawn")
                await asyncio.wait([task], timeout=_LOOK_SECONDS)
    except TimeoutError:
        raise TimeoutError("the reply was not complete in time") from None
    finally:
        task.cancel()
    return task.result()


class _Network:
    """An event loop in a thread of this process, and its clients, which keep connections."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._clients: dict[object, httpx2.AsyncClient] = {}
        threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()

    def result_of(self, exchange: Coroutine[Any, Any, T]) -> T:
        """Return the result of an exchange, which is cancelled when the caller is interrupted."""
        future = asyncio.run_coroutine_threadsafe(exchange, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def client(self, through_proxy: bool) -> httpx2.AsyncClient:
        """Return the client for servers behind the proxies of the environment, as they are now, or
        for those that are reached directly.
        """
        proxies = tuple(sorted(urllib.request.getproxies().items())) if through_proxy else None
        if proxies not in self._clients:
            limits = httpx2.Limits(max_connections=None, keepalive_expiry=_IDLE_SECONDS)
            self._clients[proxies] = httpx2.AsyncClient(
                verify=_trusted(),
                timeout=None,  # the whole exchange has a limit
                limits=limits,
                trust_env=through_proxy,
                transport=None if through_proxy else _watched(limits),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # keeps none
            )
        return self._clients[proxies]


_lock = threading.Lock()
_networks: list[_Network] = []  # one, of this process


def _network() -> _Network:
    """Return the network of this process; a fork begins with none."""
    with _lock:
        if not _networks or _networks[0].process != os.getpid():
            _networks[:] = [_Network()]
        return _networks[0]


def _new_lock() -> None:
    """Replace a lock that a thread of the parent may have held when this process was forked."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _watched(limits: httpx2.Limits) -> httpx2.AsyncHTTPTransport:
    """Return a transport whose idle connections are probed by the kernel."""
    options = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _LOST_SECONDS // 2),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _LOST_SECONDS),
    ]
    return httpx2.AsyncHTTPTransport(
        verify=_trusted(), trust_env=False, limits=limits, socket_options=options
    )


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the system's certificates, read once."""
    return ssl.create_default_context()
