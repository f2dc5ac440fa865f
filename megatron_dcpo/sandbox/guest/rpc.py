"""Values on the pipe between a program and its tests: typed JSON, no pickle, no code of the sender
runs at the reader.

Plain scalars stand for themselves; everything else is ``[tag, ...]``. Subclasses arrive as what
they derive from (``Counter`` as dict, a named tuple as tuple), so that no overridden ``__eq__``
crosses. Instances of the classes that a task itself defines (``ListNode``) travel by value in a
flat table; any other object stays where it is, as a reference.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import json
import os
import re
import select
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

# Exit statuses of a program's process that say more than "an exception", and what they say.
EXIT_MEMORY = 96
EXIT_FORBIDDEN = 97
EXIT_OUTPUT = 98
CATEGORY_OF_EXIT = {EXIT_MEMORY: "memory", EXIT_FORBIDDEN: "forbidden", EXIT_OUTPUT: "output_limit"}

MAX_DEPTH = 400
MAX_TEXT_ARRAY = 64 << 20  # bytes of an array of text, whose items all take as much as the longest
SMALL_INT = 1 << 63
_HEADER = struct.Struct("!I")
_SEQUENCES: dict[type, str] = {
    list: "l",
    tuple: "t",
    set: "s",
    frozenset: "f",
    collections.deque: "q",
}
_MAKERS = {tag: maker for maker, tag in _SEQUENCES.items()}
_PLAIN = frozenset({type(None), bool, str, float})
_NUMBERS = re.compile(r"[<>|=][biufc][0-9]{1,2}")
_NESTED = frozenset({list, dict})
_INTEGERS = frozenset({int})


class Unsendable(Exception):
    """A value that does not cross: too deep, or an object where none is allowed."""


class BadMessage(Exception):
    """Bytes that no honest sender writes."""


class TooLong(Exception):
    """A message over the limit."""


class Gone(Exception):
    """The other side has closed the pipe."""


class Encoder:
    """One message's values. ``by_value``: names of classes that travel by value; ``keep(object)``:
    its reference.
    """

    def __init__(self, by_value: Collection[str], keep: Callable[[Any], int] | None) -> None:
        self.by_value = by_value
        self.keep = keep
        self.table: list[Any] = []
        self._waiting: list[Any] = []
        self._index: dict[int, int] = {}

    def objects(self) -> list[Any]:
        """Return ``[class name, {attribute: value}]`` of every by-value object met, also in other
        objects' attributes.
        """
        while len(self.table) < len(self._waiting):
            item = self._waiting[len(self.table)]
            fields = getattr(item, "__dict__", None)
            if fields is None:
                names = [
                    name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())
                ]
                fields = {name: getattr(item, name) for name in names if hasattr(item, name)}
            encoded = {str(name): self.encode(value) for name, value in fields.items()}
            self.table.append([type(item).__name__, encoded])
        return self.table

    def encode(self, value: Any, depth: int = 0) -> Any:
        """Return the JSON-able form of ``value``; call ``objects`` once after the last value."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -SMALL_INT < value < SMALL_INT else ["i", hex(value)]
        if depth > MAX_DEPTH:
            raise Unsendable("a value nested too deeply")
        tag = _SEQUENCES.get(kind)
        if tag is not None:
            kinds = set(map(type, value))
            if _PLAIN.issuperset(kinds) or (
                kinds == _INTEGERS and min(value) > -SMALL_INT and max(value) < SMALL_INT
            ):
                return [tag, *value]
            return [tag, *[self.encode(item, depth + 1) for item in value]]
        if kind is dict:
            return self._mapping(value, depth)
        return self._rare(value, kind, depth)

    def _mapping(self, value: Any, depth: int) -> list[Any]:
        flat = ["d"]
        for key, item in dict.items(value):
            flat.append(self.encode(key, depth + 1))
            flat.append(self.encode(item, depth + 1))
        return flat

    def _rare(self, value: Any, kind: type, depth: int) -> Any:
        if kind.__name__ in self.by_value:
            return ["o", self._by_value(value)]
        if isinstance(value, type) or callable(value):
            return self._reference(value)
        if isinstance(value, int):
            return self.encode(int.__index__(value), depth)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, complex):
            return ["c", value.real, value.imag]
        if isinstance(value, bytes | bytearray):
            return ["b" if isinstance(value, bytes) else "B", bytes(value).decode("latin-1")]
        if isinstance(value, range):
            return [
                "r",
                *[self.encode(part, depth) for part in (value.start, value.stop, value.step)],
            ]
        if isinstance(value, dict):
            return self._mapping(value, depth)
        for base, tag in _SEQUENCES.items():
            if isinstance(value, base):
                return [tag, *[self.encode(item, depth + 1) for item in base.__iter__(value)]]  # type: ignore[attr-defined]
        if isinstance(value, decimal.Decimal):
            return ["D", str(value)]
        if isinstance(value, fractions.Fraction):
            return ["F", self.encode(value.numerator, depth), self.encode(value.denominator, depth)]
        if isinstance(value, collections.abc.ValuesView):
            return ["l", *[self.encode(item, depth + 1) for item in value]]
        if isinstance(value, collections.abc.KeysView | collections.abc.ItemsView):
            return ["s", *[self.encode(item, depth + 1) for item in value]]
        if kind.__module__ == "numpy":
            return self._numpy(value, depth)
        return self._reference(value)

    def _numpy(self, value: Any, depth: int) -> Any:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcU":
            return ["a", value.dtype.str, self.encode(value.tolist(), depth + 1)]
        if isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
            return self.encode(value.item(), depth + 1)
        return self._reference(value)

    def _by_value(self, value: Any) -> int:
        place = self._index.get(id(value))
        if place is None:
            place = self._index[id(value)] = len(self._waiting)
            self._waiting.append(value)  # keeps it alive: its id is its name
        return place

    def _reference(self, value: Any) -> list[Any]:
        if self.keep is None:
            raise Unsendable(f"a value of type {type(value).__name__}")
        return ["R", self.keep(value), type(value).__name__]


class Decoder:
    """Values of one message. ``classes``: the by-value classes of this side; ``refer(number, type
    name)``: a reference.
    """

    def __init__(
        self, table: Any, classes: Mapping[str, type], refer: Callable[[int, str], Any]
    ) -> None:
        self.refer = refer
        self.made: list[Any] = []
        try:
            for name, _ in table:
                self.made.append(object.__new__(classes[name]))
            for item, (_, fields) in zip(self.made, table, strict=True):
                for field, value in fields.items():
                    if isinstance(value, list) and value and value[0] == "a":
                        raise ValueError(
                            "an array as an attribute"
                        )  # an empty one is neither equal nor unequal
                    object.__setattr__(item, field, self.decode(value))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadMessage(f"objects: {error}") from None

    def decode(self, value: Any) -> Any:
        """Decode a message. Raises BadMessage on anything that ``Encoder`` does not write."""
        try:
            return self._decode(value)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ) as error:
            raise BadMessage(f"{type(error).__name__}: {error}") from None

    def _decode(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | str | int | float):
            return value
        if not isinstance(value, list):
            raise BadMessage("neither a scalar nor a tagged value")
        tag = value[0]
        maker = _MAKERS.get(tag)
        if maker is not None:
            items = value[1:]
            if _NESTED.isdisjoint(map(type, items)):
                return maker(items)
            return maker([self._decode(item) for item in items])
        if tag == "d":
            items = [self._decode(item) for item in value[1:]]
            return dict(zip(items[::2], items[1::2], strict=True))
        if tag == "i":
            return int(value[1], 16)
        if tag == "o":
            return self.made[value[1]]
        if tag == "R":
            return self.refer(int(value[1]), str(value[2]))
        if tag == "c":
            return complex(float(value[1]), float(value[2]))
        if tag in ("b", "B"):
            data = value[1].encode("latin-1")
            return data if tag == "b" else bytearray(data)
        if tag == "r":
            return range(*self._integers(value[1:]))
        if tag == "D":
            return decimal.Decimal(value[1])
        if tag == "F":
            return fractions.Fraction(*self._integers(value[1:3]))
        if tag == "a":
            return _array(str(value[1]), self._decode(value[2]))
        raise BadMessage(f"tag {tag!r}")

    def _integers(self, values: list[Any]) -> list[int]:
        """Return integers as ``Encoder`` writes them: text such as ``1e3000000000`` would become
        one with as many digits.
        """
        decoded = [self._decode(value) for value in values]
        if not all(isinstance(value, int) for value in decoded):
            raise BadMessage("not an integer")
        return decoded


def _array(kind: str, values: Any) -> Any:
    """Return a NumPy array of numbers or text. The item size comes from the values, never from the
    sender.
    """
    import numpy

    if kind[1:2] == "U":
        if not isinstance(values, list):
            return numpy.array(str(values))
        texts = list(_leaves(values))
        if not all(isinstance(text, str) for text in texts):
            raise BadMessage("not an array of text")
        if 4 * len(texts) * max(map(len, texts), default=0) > MAX_TEXT_ARRAY:
            raise BadMessage("too large an array of text")
        return numpy.array(values, dtype=str)
    if not _NUMBERS.fullmatch(kind):
        raise BadMessage(f"an array of {kind!r:.20}")
    return numpy.array(values, dtype=numpy.dtype(kind))


def _leaves(values: list[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value)
        else:
            yield value


def pack(message: Any) -> bytes:
    """Return one message with its length in front."""
    body = json.dumps(
        message, separators=(",", ":")
    ).encode()  # ASCII: lone surrogates survive escaped
    return _HEADER.pack(len(body)) + body


def write_all(pipe: int, data: bytes, seconds: float | None = None) -> None:
    """Write everything. Raises Gone when the other side has closed the pipe, TimeoutError when a
    pipe that does not block takes nothing for ``seconds``.
    """
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(pipe, view) :]
        except BlockingIOError:
            if not select.select([], [pipe], [], seconds)[1]:
                raise TimeoutError from None
        except OSError as error:
            raise Gone(str(error)) from None


class Reader:
    """Messages from a pipe, each within ``limit`` bytes."""

    def __init__(self, pipe: int, limit: int) -> None:
        self.pipe = pipe
        self.limit = limit
        self._held = b""
        self._at = 0

    def read(self, seconds: float | None = None) -> Any:
        """Return the next message. Raises Gone, TooLong, BadMessage, and TimeoutError when it is
        not complete in time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        size = _HEADER.unpack(self._take(4, deadline))[0]
        if size > self.limit:
            raise TooLong(f"{size} bytes")
        try:
            return json.loads(self._take(size, deadline))
        except (ValueError, RecursionError) as error:
            raise BadMessage(str(error)) from None

    def _take(self, size: int, deadline: float | None) -> bytes:
        end = self._at + size
        if len(self._held) < end:
            chunks = [self._held[self._at :]]
            have = len(self._held) - self._at
            while have < size:
                chunks.append(self._chunk(deadline))
                have += len(chunks[-1])
            self._held = b"".join(chunks)
            self._at = 0
            end = size
        taken = self._held[self._at : end]
        self._at = end
        return taken

    def _chunk(self, deadline: float | None) -> bytes:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.pipe], [], [], left)[0]:
                raise TimeoutError
        try:
            chunk = os.read(self.pipe, 1 << 18)
        except OSError as error:
            raise Gone(str(error)) from None
        if not chunk:
            raise Gone("closed")
        return chunk
