"""Send JSON over HTTP with retries, for every server that this package uses. Imports no torch.

A server may answer with anything, at any speed: what is read of it, and for how long, is bounded.
"""

from __future__ import annotations

import functools
import json
import logging
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.text import parse_json, printable

logger = logging.getLogger(__name__)
for _name in (
    "httpx2",
    "httpcore2",
):  # a line for each request; at DEBUG the headers of replies, which may repeat a key
    logging.getLogger(_name).setLevel(logging.WARNING)

PASSING = frozenset(
    {408, 409, 425, 429, 500, 502, 503, 504}
)  # statuses after which a request is repeated
_REDIRECTS = range(300, 400)
_WORDS = 500  # bytes of an error's body that are reported
_PIECE = 16 << 10  # bytes of a request between two looks at the clock


class HttpError(Exception):
    """No usable answer. ``status``: the HTTP status that refused the request; None when no attempt
    was answered.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class JsonClient:
    """Requests to the server at ``url``. Thread-safe.

    A request that fails in a way that may pass (no connection, time-out, a status of ``PASSING``, a
    reply that is not JSON) is repeated, ``attempts`` times in all, after pauses that double from
    ``first_pause`` to ``longest_pause`` seconds, or as long as ``Retry-After`` demands.
    ``timeout``: seconds of one attempt, to the last byte of the reply. A reply of more than
    ``max_reply_bytes`` is refused, and so is a redirect: ``api_key`` and the request are for
    ``url`` alone. No ``repr`` and no error shows the key.
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
            raise HttpError(
                "the API key holds a line break or another character that a header cannot hold"
            )

    def call(
        self,
        path: str,
        body: Any = None,
        *,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        problem: Callable[[Any], str] = lambda reply: "",
    ) -> Any:
        """Return the parsed reply to a POST of ``body``, or to a GET without one; an empty reply is
        ``{}``.

        ``stop`` ends the pauses when it is set. ``problem``: why a reply has to be asked for again,
        "" when it is good. Raises :class:`HttpError`.
        """
        stop = stop or threading.Event()
        reason = ""
        for attempt in range(self.attempts):
            pause = min(self.longest_pause, self.first_pause * 2.0**attempt) * random.uniform(
                0.5, 1.0
            )
            try:
                reply = self._once(path, body, timeout or self.timeout)
                reason = problem(reply)
                if not reason:
                    return reply
            except httpx2.HTTPStatusError as error:
                reason = str(error)
                status = error.response.status_code
                if status not in PASSING:
                    raise HttpError(reason, status) from None
                after = error.response.headers.get("Retry-After", "").strip()
                if after.isdecimal():  # its other form, a date, is left to our own pauses
                    pause = min(self.longest_pause, float(after))
            except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
                reason = self.without_key(f"{type(error).__name__}: {one_line(error, _WORDS)}")
            if attempt + 1 < self.attempts:
                logger.debug("%s%s: %s; once more", self.url, path, reason)
                if stop.wait(pause):
                    break
        raise HttpError(reason)

    def without_key(self, text: str) -> str:
        """Return printable ``text`` of the server, which knows the key and may repeat it, without
        the key.
        """
        return printable(text.replace(self.api_key, "***") if self.api_key else text)

    def _once(self, path: str, body: Any, timeout: float) -> Any:
        """Return the parsed reply to one request. Raises HTTPStatusError, whose text is ours, for
        any status but 2xx.
        """
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        if body is None:
            method = "GET"
            data = None
        else:
            method = "POST"
            data = json.dumps(body).encode()
        options: dict[str, Any] = {
            "content": data,
            "extensions": {"trace": _end_all_io_at(time.monotonic() + timeout)},
        }
        with (
            httpx2.Client(verify=_trusted(), timeout=timeout, headers=headers) as client,
            client.stream(method, self.url.rstrip("/") + path, **options) as reply,
        ):
            if not reply.is_success:
                raise httpx2.HTTPStatusError(
                    self._refusal(path, reply), request=reply.request, response=reply
                )
            text = _read(reply, self.max_reply_bytes + 1)
        if len(text) > self.max_reply_bytes:
            raise HttpError(f"a reply of more than {self.max_reply_bytes >> 20} MB")
        return parse_json(text) if text.strip() else {}

    def _refusal(self, path: str, reply: httpx2.Response) -> str:
        """Return the status and the first words of a reply that refuses the request."""
        if reply.status_code in _REDIRECTS:
            there = self.without_key(one_line(reply.headers.get("Location"), _WORDS))
            return f"{self.url}{path} redirects to {there}; redirects are not followed, name the address itself"
        try:
            words = _read(reply, _WORDS).decode(errors="replace")
        except (httpx2.HTTPError, OSError) as unread:
            words = type(unread).__name__
        return self.without_key(f"HTTP {reply.status_code} {one_line(words)}".strip())


def _read(reply: httpx2.Response, most: int) -> bytes:
    """Return the first ``most`` bytes of the body as they were sent: decompressed they could be any
    number.
    """
    text = bytearray()
    for piece in reply.iter_raw():
        text += piece
        if len(text) >= most:
            break
    return bytes(text[:most])


def _end_all_io_at(deadline: float) -> Callable[[str, dict[str, Any]], None]:
    """Return a trace hook that ends a connection's reads and writes at ``deadline`` (of the
    monotonic clock): httpx2's own time-out is that of each read, which a server that sends a byte
    now and then never reaches.
    """

    def left() -> float:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the reply was not complete in time")
        return seconds

    def hook(event: str, info: dict[str, Any]) -> None:
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            stream = info["return_value"]
            read = stream.read
            write = stream.write
            stream.read = lambda size, timeout=None: read(size, left())
            stream.write = lambda data, timeout=None: [
                write(data[at : at + _PIECE], left()) for at in range(0, len(data), _PIECE)
            ]

    return hook


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return the system's certificates, read once."""
    return ssl.create_default_context()
