"""JSON over HTTP with retries, for every server that this package uses. Standard library only; imports no torch."""

from __future__ import annotations

import http.client
import json
import logging
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})  # statuses after which a request is repeated
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
    seconds, or as long as ``Retry-After`` demands. ``timeout``: seconds without a byte. A reply of more than
    ``max_reply_bytes`` is refused. ``api_key`` is sent to ``url`` alone: no redirect gets it, and no ``repr`` shows it.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    attempts: int = 1
    first_pause: float = 0.5
    longest_pause: float = 60.0
    max_reply_bytes: int = 256 << 20

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
                reason = f"HTTP {error.code} {' '.join(error.read(_WORDS).decode(errors='replace').split())}".strip()
                if error.code not in PASSING:
                    raise HttpError(reason, error.code) from None
                after = error.headers.get("Retry-After") or ""
                if after.strip().isdecimal():  # its other form, a date, is left to our own pauses
                    pause = min(self.longest_pause, float(after))
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt + 1 < self.attempts:
                logger.debug("%s%s: %s; once more", self.url, path, reason)
                if stop.wait(pause):
                    break
        raise HttpError(reason)

    def _once(self, path: str, body: Any, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        if self.api_key:
            request.add_unredirected_header("Authorization", f"Bearer {self.api_key}")
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            text = reply.read(self.max_reply_bytes + 1)
        if len(text) > self.max_reply_bytes:
            raise HttpError(f"a reply of more than {self.max_reply_bytes >> 20} MB")
        return json.loads(text) if text.strip() else {}
