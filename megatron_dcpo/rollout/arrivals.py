"""Calls that arrive while an engine runs: a queue between the threads that take requests and the
one that owns the engine (:meth:`megatron_dcpo.rollout.engine.Engine.serve`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_dcpo.types import Prompt, ResponseKey


class StopTexts:
    """The ``texts`` at which one call ends. It is called with each sampled token, whose bytes
    ``piece_of`` returns, and returns whether a text is complete with it.
    """

    def __init__(self, texts: Sequence[str], piece_of: Callable[[int], bytes]) -> None:
        self.texts = tuple(texts)
        self._piece_of = piece_of
        self._searched = [text.encode() for text in texts]
        self._kept = max(map(len, self._searched)) - 1
        self._tail = b""

    def __call__(self, token: int) -> bool:
        seen = self._tail + self._piece_of(token)
        self._tail = seen[-self._kept :] if self._kept else b""
        return any(text in seen for text in self._searched)


@dataclass(frozen=True)
class EngineCall:
    """A response that an engine is to sample: to ``prompt``, whose id no other call has, with at
    most ``max_tokens`` tokens, up to the token with which one of the texts of ``ends`` is complete.
    """

    prompt: Prompt
    index: int
    max_tokens: int
    ends: StopTexts | None = None

    @property
    def key(self) -> ResponseKey:
        return self.prompt.prompt_id, self.index


class Arrivals:
    """Thread-safe. Whoever asks calls :meth:`put` and :meth:`cancel`; the engine takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[EngineCall] = deque()
        self._cancelled: set[ResponseKey] = set()
        self._closed = False
        self._woken = False

    def put(self, *calls: EngineCall) -> None:
        """Add calls, which the engine admits together."""
        with self._changed:
            self._waiting += calls
            self._changed.notify()

    def cancel(self, key: ResponseKey) -> None:
        """Give up a call: it gets no response."""
        with self._changed:
            kept = [call for call in self._waiting if call.key != key]
            if len(kept) == len(self._waiting):
                self._cancelled.add(key)
            self._waiting = deque(kept)
            self._changed.notify()

    def wake(self) -> None:
        """Let an engine that waits look around."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Say that no call comes any more."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def is_over(self) -> bool:
        """Return whether no call waits and none comes any more."""
        return self._closed and not self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, most: int) -> list[EngineCall]:
        """Return the next calls, at most so many."""
        with self._changed:
            count = min(most, len(self._waiting))
            return [self._waiting.popleft() for _ in range(count)]

    def take_cancelled(self) -> set[ResponseKey]:
        """Return the calls that were given up while the engine had them."""
        if not self._cancelled:
            return set()
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            return cancelled

    def wait(self, seconds: float) -> None:
        """Return when something has changed, after so many seconds at the latest."""
        with self._changed:
            if not (self._waiting or self._cancelled or self._closed or self._woken):
                self._changed.wait(seconds)
            self._woken = False
