"""Requests with which an upstream has refused log-probs: others of the same kind are sent without,
for a while.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.exact_json import compact

SECONDS = 60.0
MOST = 1024
# what a client says differs in every request, and is no option
_CONTENT = frozenset(("messages", "prompt", "metadata", "user", "seed", "suffix"))


class Refusals:
    """Remembers at most ``most`` kinds of requests, each for ``seconds``, with the reason."""

    def __init__(
        self,
        seconds: float = SECONDS,
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self.most = most
        self.clock = clock
        self._known: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, asked: Asked, reason: str) -> None:
        """Remember that requests of this kind are refused with log-probs, and answered without."""
        kind = _kind_of(asked)
        self._known[kind] = (self.clock() + self.seconds, reason)
        self._known.move_to_end(kind)
        if len(self._known) > self.most:
            self._known.popitem(last=False)

    def reason(self, asked: Asked) -> str:
        """Return why requests of this kind are sent without log-probs, "" if they are not."""
        if not self._known:
            return ""
        kind = _kind_of(asked)
        end, reason = self._known.get(kind, (0.0, ""))
        if reason and end <= self.clock():
            del self._known[kind]
            return ""
        return reason


def _kind_of(asked: Asked) -> bytes:
    """Return a digest of everything that may be why log-probs are refused: the path, the model and
    all options as they are, and of messages their roles and the kinds of their parts.
    """
    options = {name: value for name, value in asked.body.items() if name not in _CONTENT}
    shapes = [_shape_of(asked.body.get("messages")), type(asked.body.get("prompt")).__name__]
    ordered = sorted(options.items())
    return hashlib.blake2b(compact([asked.api, ordered, shapes]), digest_size=16).digest()


def _shape_of(messages: object) -> list[str]:
    """Return the roles of messages and the kinds of their parts, each once."""
    found: set[str] = set()
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, Mapping):
            continue
        found |= {f"has {name}" for name in message}
        found.add(f"role {message.get('role')!r:.50}")
        content: Any = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            found.add(f"part {kind!r:.50}")
    return sorted(found)
