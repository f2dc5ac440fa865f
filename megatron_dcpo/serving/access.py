"""Who may ask ``dcpo serve``: requests by a name of this machine, of no other page, and with a key
if keys are required.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.asgi import App, Message, Receive, Send
from megatron_dcpo.runtime.local_names import is_local_host, is_same_origin
from megatron_dcpo.serving.relaying import send_error

_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_BEARER = b"bearer "
_SHORTEST_KEY = 8


@dataclass(frozen=True)
class Access:
    """``app`` gets the requests that are allowed. With ``is_local`` those alone that name this
    machine in ``Host``; with ``keys`` those alone that have one of them, which is taken off.
    """

    app: App
    is_local: bool = True
    keys: Sequence[bytes] = ()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, words = self._refusal(scope)
        if status:
            await send_error(send, status, words)
            return
        if self.keys:
            headers = [one for one in scope["headers"] if one[0] != b"authorization"]
            scope = {**scope, "headers": headers}
        await self.app(scope, receive, send)

    def _refusal(self, scope: Message) -> tuple[int, str]:
        """Return status and words for a request that is not allowed, (0, "") for another one."""
        if scope["method"] not in _METHODS:
            return 405, "this method is not passed on"
        hosts = _values(scope, b"host")
        if len(hosts) != 1:
            return 400, "a request names one host"
        if self.is_local and not is_local_host(hosts[0]):
            return 403, "ask for 127.0.0.1 or localhost"
        origins = _values(scope, b"origin")
        if origins and not all(is_same_origin(one, hosts[0]) for one in origins):
            return 403, "a page of another origin may not ask"
        if self.keys and not self._has_key(scope):
            return 401, "the request has no key of --api-key-file"
        return 0, ""

    def _has_key(self, scope: Message) -> bool:
        """Return whether a request has one of the keys; all are compared, in constant time."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1 or given[0][: len(_BEARER)].lower() != _BEARER:
            return False
        key = given[0][len(_BEARER) :].strip()
        matches = [hmac.compare_digest(key, one) for one in self.keys]
        return any(matches)


def _values(scope: Message, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def read_keys(path: str) -> tuple[bytes, ...]:
    """Return the keys of a file, one a line. Raises :class:`UserError`."""
    try:
        lines = Path(path).read_text(encoding="ascii").split("\n")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII text"
        raise UserError(f"--api-key-file {path}: {reason}") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys or any(len(key) < _SHORTEST_KEY or " " in key for key in keys):
        raise UserError(
            f"--api-key-file {path}: it needs a key of at least {_SHORTEST_KEY} characters without "
            "spaces on each line"
        )
    return tuple(key.encode() for key in keys)
