"""Who may ask ``dcpo serve``: requests by a name of this machine, of no other page, and with a key
if keys are required.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware.trustedhost import TrustedHostMiddleware

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.asgi import App, Message, Receive, Send
from megatron_dcpo.runtime.local_names import is_same_origin
from megatron_dcpo.serving.exchange import send_error

_THIS_MACHINE = ("localhost", "127.0.0.1", "[::1]")
_BEARER = "bearer "
_SHORTEST_KEY = 8


def guarded(app: App, is_local: bool = True, keys: Sequence[bytes] = ()) -> App:
    """Return an application that gets the requests that are allowed. With ``is_local`` those alone
    that name this machine in ``Host``; with ``keys`` those alone that have one, which is taken off.
    """
    hosts = _THIS_MACHINE if is_local else ("*",)
    return TrustedHostMiddleware(_Access(app, keys), hosts, www_redirect=False)


@dataclass(frozen=True)
class _Access:
    app: App
    keys: Sequence[bytes]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and not is_same_origin(origin, headers.get("host", "")):
                await send_error(send, 403, "a page of another origin may not ask")
                return
            if self.keys:
                if not self._has_key(headers.get("authorization", "")):
                    await send_error(send, 401, "the request has no key of --api-key-file")
                    return
                rest = [one for one in scope["headers"] if one[0] != b"authorization"]
                scope = {**scope, "headers": rest}
        await self.app(scope, receive, send)

    def _has_key(self, given: str) -> bool:
        """Return whether a request has one of the keys; all are compared, in constant time."""
        if not given.lower().startswith(_BEARER):
            return False
        key = given[len(_BEARER) :].strip().encode("latin-1")
        matches = [hmac.compare_digest(key, one) for one in self.keys]
        return any(matches)


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
