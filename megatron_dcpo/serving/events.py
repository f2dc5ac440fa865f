"""Server-sent events: read from bytes as they come, however they are cut, and written in one form.

Line ends, UTF-8 and a byte order mark are the standard library's incremental decoders'. Each byte
is looked at once; an event longer than the limit is refused while it comes.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from dataclasses import dataclass

DONE = "[DONE]"
_FIELDS = ("event", "id", "retry")  # besides the data; readers ignore others, which are left out


@dataclass(frozen=True)
class Event:
    """``data`` is None in an event that has none: a comment, an id, a time. ``lines`` are all
    other fields, as they came.
    """

    data: str | None = None
    lines: tuple[str, ...] = ()

    def encoded(self) -> bytes:
        """Return the event as it is sent."""
        lines = list(self.lines)
        if self.data is not None:
            lines += [f"data: {line}" for line in self.data.split("\n")]
        text = "\n".join(lines) + "\n\n"
        return text.encode("utf-8", "surrogateescape")


class EventTooLongError(ValueError):
    """An event is longer than the limit."""


class EventDecoder:
    """``feed`` takes bytes as they come and yields the events that are complete. Bytes that are not
    UTF-8 become lone surrogates, which no JSON text has.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        utf8 = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape")
        self._decoder = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._begun: list[str] = []  # the pieces of a line that has no end yet
        self._lines: list[str] = []
        self._data: list[str] = []
        self._size = 0  # of the event that is not complete yet

    def feed(self, piece: bytes, is_last: bool = False) -> Iterator[Event]:
        """Yield the events that a piece completes; the last piece completes the last one. Raises
        :class:`EventTooLongError`.
        """
        lines = self._decoder.decode(piece, final=is_last).split("\n")
        if is_last:
            lines += ["", ""]
        for rest in lines[:-1]:
            self._grow(rest)
            line = "".join(self._begun)
            self._begun = []
            yield from self._read(line)
        self._grow(lines[-1])

    def _grow(self, text: str) -> None:
        self._size += len(text)
        if self._size > self.longest:
            raise EventTooLongError(f"the upstream sends an event of over {self.longest} bytes")
        if text:
            self._begun.append(text)

    def _read(self, line: str) -> Iterator[Event]:
        """Take a line; a comment is passed on at once, and an empty line completes an event."""
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif line.startswith(":"):
            self._size -= len(line)
            yield Event(lines=(line,))
        elif name in _FIELDS:
            self._lines.append(line)
        elif not line and (self._data or self._lines):
            data = "\n".join(self._data) if self._data else None
            yield Event(data, tuple(self._lines))
            self._data, self._lines, self._size = [], [], 0
