"""Whether a request is for this machine, and from a page of its own: what keeps pages of the
internet out of servers on the loopback address (DNS rebinding, requests across origins).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

# a Host header: a name or an address, and a port
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_LOCAL = frozenset(("localhost", "127.0.0.1", "[::1]"))


def is_local_host(header: str) -> bool:
    """Return whether a ``Host`` header names this machine by its loopback address."""
    found = _HOST.fullmatch(header)
    return found is not None and found[1].lower() in _LOCAL


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on is reached from this machine alone."""
    return host in ("localhost", "127.0.0.1", "::1")


def is_same_origin(origin: str, host: str) -> bool:
    """Return whether an ``Origin`` header names the server that the ``Host`` header names."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()
