"""JSON over HTTP with retries, for every server that this package uses. Standard library only; imports no torch.

A server may answer with anything, at any speed: what is read of it, and for how long, is bounded.
"""

from __future__ import annotations

import functools
import http.client
import io
import json
import logging
import random
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.text import parse_json, printable

logger = logging.getLogger(__name__)

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # statuses after which a request is repeated
_REDIRECTS = range(300, 400)
_WORDS = 500  # bytes of an error's body that are reported


class HttpError(Exception):
    """No usable answer. ``status``: the HTTP status that refused the request; None when no attempt was answered."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class JsonClient:
    """Requests to the server at ``url``. Thread-safe.

    A request that fails in a way that may pass (no connection, time-out, a status of ``PASSING``, a reply that is not
    JSON) is repeated, ``attempts`` times in all, after pauses that double from ``first_pause`` to ``longest_pause``
    seconds, or as long as ``Retry-After`` demands. ``timeout``: seconds of one attempt, to the last byte of the reply. A
    reply of more than ``max_reply_bytes`` is refused, and so is a redirect: ``api_key`` and the request are for ``url``
    alone. No ``repr`` and no error shows the key.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    attempts: int = 1
    first_pause: float = 0.5
    longest_pause: float = 60.0
    max_reply_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if self.api_key and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise HttpError("the API key holds a line break or another character that a header cannot hold")

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        problem: Callable[[Any], str] = lambda reply: "",
    ) -> Any:
        """The parsed reply to a POST of ``body``, or to a GET without one; an empty reply is ``{}``.

        ``stop`` ends the pauses when it is set. ``problem``: why a reply has to be asked for again, "" when it is good.
        Raises :class:`HttpError`.
        """
        stop = stop or threading.Event()
        reason = ""
        for attempt in range(self.attempts):
            pause = min(self.longest_pause, self.first_pause * 2.0**attempt) * random.uniform(0.5, 1.0)
            try:
                reply = self._once(path, body, timeout or self.timeout)
                reason = problem(reply)
                if not reason:
                    return reply
            except urllib.error.HTTPError as error:
                reason = self._refusal(path, error)
                if error.code not in PASSING:
                    raise HttpError(reason, error.code) from None
                after = error.headers.get("Retry-After") or ""
                if after.strip().isdecimal():  # its other form, a date, is left to our own pauses
                    pause = min(self.longest_pause, float(after))
            except (OSError, http.client.HTTPException, ValueError) as error:
                reason = self.without_key(f"{type(error).__name__}: {one_line(error, _WORDS)}")
            if attempt + 1 < self.attempts:
                logger.debug("%s%s: %s; once more", self.url, path, reason)
                if stop.wait(pause):
                    break
        raise HttpError(reason)

    def without_key(self, text: str) -> str:
        """``text`` of the server, which knows the key and may repeat it."""
        return printable(text.replace(self.api_key, "***") if self.api_key else text)

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        with error:
            if error.code in _REDIRECTS:
                there = self.without_key(one_line(error.headers.get("Location"), _WORDS))
                return f"{self.url}{path} redirects to {there}; redirects are not followed, name the address itself"
            try:
                words = error.read(_WORDS).decode(errors="replace")
            except (OSError, http.client.HTTPException) as unread:
                words = type(unread).__name__
            return self.without_key(f"HTTP {error.code} {one_line(words)}".strip())

    def _once(self, path: str, body: Any, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        if self.api_key:
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        with _opener().open(request, timeout=timeout) as reply:
            text = reply.read(self.max_reply_bytes + 1)
        if len(text) > self.max_reply_bytes:
            raise HttpError(f"a reply of more than {self.max_reply_bytes >> 20} MB")
        return parse_json(text) if text.strip() else {}


class _Reader(io.RawIOBase):
    """Reads a socket until ``deadline`` (of the monotonic clock), however little arrives at a time."""

    def __init__(self, source: socket.socket, deadline: float) -> None:
        self.source, self.deadline = source, deadline
        self.bytes: Any = source.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the reply was not complete in time")
        self.source.settimeout(left)
        return int(self.bytes.readinto(buffer) or 0)

    def close(self) -> None:
        self.bytes.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, source: socket.socket, *rest: Any, deadline: float, **named: Any) -> None:
        super().__init__(source, *rest, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Reader(source, deadline))


class _Connection(http.client.HTTPConnection):
    """Its time-out is that of the whole exchange, and not of each read."""

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        _set_deadline(self, options["timeout"])


class _SecureConnection(http.client.HTTPSConnection):
    """The same with TLS."""

    def __init__(self, host: str, **options: Any) -> None:
        super().__init__(host, **options)
        _set_deadline(self, options["timeout"])


def _set_deadline(connection: http.client.HTTPConnection, seconds: float) -> None:
    response = functools.partial(_Response, deadline=time.monotonic() + seconds)
    connection.response_class = response  # type: ignore[assignment]


class _Http(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """A redirect stays what it is, an ``HTTPError``."""


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Http, _Https, _NoRedirect)
