"""The program in a response: the last complete fenced block of Python."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_dcpo.judging.confidence import MARKER

# A fence of three or more backticks or tildes on a line of its own, perhaps indented or quoted in a list.
_OPENING = re.compile(rb"^([ \t]*)(`{3,}|~{3,})[ \t]*([^`\r\n]*?)[ \t]*\r?$")
_LANGUAGES = (b"", b"python", b"py", b"python2", b"python3", b"py3", b"cpython", b"pypy", b"pypy3")


@dataclass(frozen=True)
class Fence:
    """Bytes ``[start, end)`` of a fenced block, its fences included, and its lines without common indentation."""

    start: int
    end: int
    program: bytes


def last_fence(content: bytes) -> Fence | None:
    """The last complete block that is marked as Python or not marked at all.

    A block ends at a line with nothing but at least as many of the same character. An opening fence that is never
    closed opens nothing: blocks before it count. Blocks in other languages are passed over. Linear in the length.
    """
    found = None
    opening: tuple[int, bytes, bytes, bytes] | None = None
    body: list[bytes] = []
    at = 0
    for line in content.split(b"\n"):
        match = _OPENING.match(line) if line.lstrip(b" \t")[:3] in (b"```", b"~~~") else None
        if opening is not None:
            fence = match[2] if match and not match[3] else b""
            if fence[:1] == opening[2][:1] and len(fence) >= len(opening[2]):
                if opening[3] in _LANGUAGES:
                    found = Fence(opening[0], min(at + len(line), len(content)), b"\n".join(body))
                opening = None
            else:
                body.append(_without(line.removesuffix(b"\r"), opening[1]))
        elif match:
            words = match[3].lower().replace(b"{", b" ").replace(b"}", b" ").replace(b".", b" ").split()
            opening, body = (at, match[1], match[2], words[0] if words else b""), []
        at += len(line) + 1
    return found


def find_marker_after_program(content: bytes, marker: bytes) -> int | None:
    """Offset of the marker that opens the confidence block of a response with a program, None when there is none.

    The first marker behind the last complete block; else, when no marker follows a block, the last one before it.
    A marker inside the block is part of the program.
    """
    fence = last_fence(content)
    after = content.find(marker, fence.end if fence else 0)
    if after >= 0:
        return after
    before = content.rfind(marker, 0, fence.start) if fence else -1
    return before if before >= 0 else None


def extract_program(response: str, marker: str | None = MARKER) -> str | None:
    """The last complete fenced program of the reasoning block, None when there is none.

    A block after the confidence line is no answer: what states the confidence must not change R. ``marker`` None: the
    text is the reasoning block itself.
    """
    content = response.encode(errors="surrogatepass")
    at = None if marker is None else find_marker_after_program(content, marker.encode())
    fence = last_fence(content if at is None else content[:at])
    return None if fence is None else fence.program.decode(errors="surrogatepass")


def _without(line: bytes, indentation: bytes) -> bytes:
    return line[len(indentation) :] if line.startswith(indentation) else line.lstrip(b" \t")
