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
_FIELDS = ("event", "data", "id", "retry")


@dataclass(frozen=True)
class Event:
    """``data`` is None in an event that only names an id or a time; ``id`` and ``name`` are None if
    the event has no such field. A comment is no event, and has ``comment`` alone.
    """

    data: str | None = None
    name: str | None = None
    id: str | None = None
    retry: str | None = None
    comment: str | None = None

    def encoded(self) -> bytes:
        """Return the event as it is sent."""
        lines = []
        if self.comment is not None:
            lines.append(f": {self.comment}")
        if self.name is not None:
            lines.append(f"event: {self.name}")
        if self.id is not None:
            lines.append(f"id: {self.id}")
        if self.retry is not None:
            lines.append(f"retry: {self.retry}")
        if self.data is not None:
            lines += [f"data: {line}" for line in self.data.split("\n")]
        text = "\n".join(lines) + "\n\n"
        return text.encode("utf-8", "surrogateescape")

    @property
    def is_done(self) -> bool:
        """Return whether it says that the stream is complete."""
        return self.data is not None and self.data.strip() == DONE


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
        self._line: list[str] = []  # the pieces of a line that has no end yet
        self._data: list[str] = []
        self._fields: dict[str, str] = {}
        self._size = 0  # of the event that is not complete yet

    @property
    def is_amid(self) -> bool:
        """Return whether an event has begun that is not complete."""
        return bool(self._line or self._data or self._fields)

    def feed(self, piece: bytes, is_last: bool = False) -> Iterator[Event]:
        """Yield the events that a piece completes; the last piece completes the last one. Raises
        :class:`EventTooLongError`.
        """
        lines = self._decoder.decode(piece, final=is_last).split("\n")
        for rest in lines[:-1]:
            self._grow(rest)
            line = "".join(self._line)
            self._line = []
            yield from self._read(line)
        self._grow(lines[-1])
        if is_last and self.is_amid:
            line = "".join(self._line)
            self._line = []
            if line:
                yield from self._read(line)
            yield from self._read("")

    def _grow(self, text: str) -> None:
        self._size += len(text)
        if self._size > self.longest:
            raise EventTooLongError(f"an event of more than {self.longest} characters")
        if text:
            self._line.append(text)

    def _read(self, line: str) -> Iterator[Event]:
        """Take a line; an empty one completes an event."""
        if not line:
            yield from self._completed()
            return
        if line.startswith(":"):
            yield Event(comment=line[1:].removeprefix(" "))
            self._size -= len(line)
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name in _FIELDS:
            self._fields[name] = value

    def _completed(self) -> Iterator[Event]:
        data, fields = self._data, self._fields
        self._data, self._fields, self._size = [], {}, 0
        if not data and not fields:
            return
        yield Event(
            data="\n".join(data) if data else None,
            name=fields.get("event"),
            id=fields.get("id"),
            retry=fields.get("retry"),
        )
