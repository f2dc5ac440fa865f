"""The path that a client asks for, checked before it becomes part of an address: whichever parser
the server has, it stays below the upstream's own address.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from megatron_dcpo.runtime.asgi import BadRequestError, Message

# what may stand in a path and in a query: printable ASCII without spaces
_PATH = re.compile(rb"/[!-~]*\Z")
_QUERY = re.compile(rb"[!-~]*\Z")
_NEVER = (b"#", b"\\")  # in a path
_MOST_DECODED = 4  # times that a path is decoded, more than any server does


def checked_target(scope: Message) -> tuple[bytes, bytes]:
    """Return path and query of a request as the client wrote them. Raises
    :class:`BadRequestError` for an absolute target, for a path that climbs, and for characters that
    a target does not have.
    """
    path = scope.get("raw_path")
    if path is None:
        path = scope["path"].encode()
    query = scope.get("query_string", b"")
    is_readable = _PATH.match(path) and _QUERY.match(query)
    if not is_readable or any(one in path for one in _NEVER) or b"#" in query:
        raise BadRequestError("the target is not the path of a resource")
    if b"@" in path.split(b"/")[1]:
        raise BadRequestError("the target names a user or a host")
    decoded = path.decode("ascii")
    for _ in range(_MOST_DECODED):
        _check_segments(decoded)
        again = unquote(decoded, encoding="latin-1")
        if again == decoded:
            return path, query
        decoded = again
    raise BadRequestError("the path is encoded too many times")


def _check_segments(path: str) -> None:
    """Raise :class:`BadRequestError` for a decoded path that leaves its place."""
    if "\\" in path or any(ord(character) < 32 or ord(character) == 127 for character in path):
        raise BadRequestError("the path has characters that no path has")
    if "//" in path:
        raise BadRequestError("the path has an empty segment")
    for segment in path.split("/"):
        # some servers read what follows a semicolon as a parameter
        if segment.partition(";")[0] in (".", ".."):
            raise BadRequestError("the path climbs")
