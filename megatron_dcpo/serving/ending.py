"""How the server ends: it takes no new requests, and those under way go on for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from megatron_dcpo.serving.relaying import UpstreamError

_UNAVAILABLE = 503


class ServerEndsError(UpstreamError):
    """The server ends before an answer is complete."""

    status = _UNAVAILABLE


class Shutdown:
    """Knows the requests under way. ``has_begun`` says that no new ones are taken, ``is_over`` that
    the time for those under way is over.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self.is_over = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def begin(self, grace: float) -> None:
        """Take no new requests, and end those under way after ``grace`` seconds."""
        self.has_begun = True
        asyncio.get_running_loop().call_later(grace, self._end)

    def _end(self) -> None:
        self.is_over = True
        for task in self._tasks:
            task.cancel()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Raise :class:`ServerEndsError` in a request that the server does not wait for."""
        if self.has_begun:
            raise ServerEndsError("the server is ending")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_over:
                raise
            task.uncancel()
            raise ServerEndsError("the server is ending") from None
        finally:
            self._tasks.discard(task)
