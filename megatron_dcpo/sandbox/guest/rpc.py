"""Values on the pipe between a program and its tests: typed JSON. There is no pickle, and no code
of the sender runs at the reader.

Plain scalars stand for themselves; everything else is ``[tag, ...]``. Instances of subclasses
arrive as instances of the builtin type (``Counter`` as dict, a named tuple as tuple), so that no
overridden ``__eq__`` crosses. Instances of the classes that a task defines (``ListNode``) travel by
value in a flat table; any other object stays where it is and is represented by a reference.
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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

# Exit statuses of a program's process that mean more than "an exception", and their meaning.
EXIT_MEMORY = 96
EXIT_FORBIDDEN = 97
EXIT_OUTPUT = 98
CATEGORY_OF_EXIT = {EXIT_MEMORY: "memory", EXIT_FORBIDDEN: "forbidden", EXIT_OUTPUT: "output_limit"}

MAX_DEPTH = 400
# bytes of an array of text, in which every item takes as much as the longest
MAX_TEXT_ARRAY = 64 << 20
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
    """A value that cannot be sent: it is too deep, or an object that may not be referred to."""


class BadMessage(Exception):
    """Bytes that no honest sender writes."""


class TooLong(Exception):
    """A message over the limit."""


class Gone(Exception):
    """The other side has closed the pipe."""


class Encoder:
    """Encodes the values of one message. Instances of the classes named in ``by_value`` travel by
    value; ``keep`` returns the number under which another object can be referred to.
    """

    def __init__(self, by_value: Collection[str], keep: Callable[[object], int] | None) -> None:
        self.by_value = by_value
        self.keep = keep
        self.table: list[object] = []
        self._waiting: list[object] = []
        self._index: dict[int, int] = {}

    def objects(self) -> list[object]:
        """Return ``[class name, {attribute: value}]`` for every by-value object that was met, also
        in attributes of other objects.
        """
        while len(self.table) < len(self._waiting):
            item = self._waiting[len(self.table)]
            fields = getattr(item, "__dict__", None)
            if fields is None:
                fields = _slots(item)
            encoded = {str(name): self.encode(value) for name, value in fields.items()}
            self.table.append([type(item).__name__, encoded])
        return self.table

    def encode(self, value: object, depth: int = 0) -> object:
        """Return ``value`` as JSON can hold it; call ``objects`` once after the last value."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return _encode_integer(value)  # type: ignore[arg-type]
        if depth > MAX_DEPTH:
            raise Unsendable("a value nested too deeply")
        tag = _SEQUENCES.get(kind)
        if tag is not None:
            return self._sequence(tag, value, depth)  # type: ignore[arg-type]
        if kind is dict:
            return self._mapping(value, depth)  # type: ignore[arg-type]
        return self._rare(value, kind, depth)

    # Nested values go through two Python frames a level, three for subclasses: MAX_DEPTH levels
    # have to stay below Python's limit.
    def _sequence(self, tag: str, value: Collection[Any], depth: int) -> list[object]:
        kinds = set(map(type, value))
        as_it_is = _PLAIN.issuperset(kinds)
        if kinds == _INTEGERS:
            as_it_is = min(value) > -SMALL_INT and max(value) < SMALL_INT
        if as_it_is:
            return [tag, *value]
        encoded: list[object] = [tag]
        for item in value:
            encoded.append(self.encode(item, depth + 1))
        return encoded

    def _items(self, tag: str, values: Iterable[object], depth: int) -> list[object]:
        encoded: list[object] = [tag]
        for item in values:
            encoded.append(self.encode(item, depth + 1))
        return encoded

    def _mapping(self, value: dict[object, object], depth: int) -> list[object]:
        flat: list[object] = ["d"]
        for key, item in dict.items(value):
            flat.append(self.encode(key, depth + 1))
            flat.append(self.encode(item, depth + 1))
        return flat

    def _rare(self, value: object, kind: type, depth: int) -> object:
        if kind.__name__ in self.by_value:
            return ["o", self._number(value)]
        if isinstance(value, type) or callable(value):
            return self._reference(value)
        for base, encode in _SCALARS:
            if isinstance(value, base):
                return encode(value)
        if isinstance(value, dict):
            return self._mapping(value, depth)
        for base, tag, iterate in _ITERABLES:
            if isinstance(value, base):
                return self._items(tag, iterate(value), depth)
        if kind.__module__ == "numpy":
            return self._numpy(value, depth)
        return self._reference(value)

    def _numpy(self, value: object, depth: int) -> object:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcU":
            return ["a", value.dtype.str, self.encode(value.tolist(), depth + 1)]
        if isinstance(value, numpy.generic) and not isinstance(value, numpy.void):
            return self.encode(value.item(), depth + 1)
        return self._reference(value)

    def _number(self, value: object) -> int:
        """Return the number of a by-value object in the table."""
        number = self._index.get(id(value))
        if number is None:
            number = len(self._waiting)
            self._index[id(value)] = number
            self._waiting.append(value)  # keeps it alive, because its id identifies it
        return number

    def _reference(self, value: object) -> list[object]:
        if self.keep is None:
            raise Unsendable(f"a value of type {type(value).__name__}")
        return ["R", self.keep(value), type(value).__name__]


def _slots(item: object) -> dict[str, object]:
    """Return the attributes of an object without a ``__dict__``."""
    fields = {}
    for kind in type(item).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(item, name):
                fields[name] = getattr(item, name)
    return fields


def _encode_integer(value: int) -> object:
    if -SMALL_INT < value < SMALL_INT:
        return value
    return ["i", hex(value)]


def _encode_bytes(value: bytes | bytearray) -> object:
    tag = "b" if isinstance(value, bytes) else "B"
    return [tag, bytes(value).decode("latin-1")]


def _encode_range(value: range) -> object:
    parts = (value.start, value.stop, value.step)
    return ["r", *[_encode_integer(int(part)) for part in parts]]


def _encode_fraction(value: fractions.Fraction) -> object:
    return ["F", _encode_integer(value.numerator), _encode_integer(value.denominator)]


# Rarer types and subclasses of the common ones, in the order in which they are tried.
_SCALARS: tuple[tuple[Any, Callable[[Any], object]], ...] = (
    (int, lambda value: _encode_integer(int.__index__(value))),
    (float, float.__float__),
    (str, str.__str__),
    (complex, lambda value: ["c", value.real, value.imag]),
    ((bytes, bytearray), _encode_bytes),
    (range, _encode_range),
    (decimal.Decimal, lambda value: ["D", str(value)]),
    (fractions.Fraction, _encode_fraction),
)
# With the base's own __iter__: what a subclass overrides is not called.
_ITERABLES: tuple[tuple[type, str, Callable[[Any], Iterable[object]]], ...] = (
    *[(base, tag, base.__iter__) for base, tag in _SEQUENCES.items()],  # type: ignore[attr-defined]
    (collections.abc.ValuesView, "l", iter),
    (collections.abc.KeysView, "s", iter),
    (collections.abc.ItemsView, "s", iter),
)


class Decoder:
    """Decodes the values of one message. ``classes`` are the by-value classes of this side, and
    ``refer`` returns an object for the number and the type name of a reference.
    """

    def __init__(
        self, table: object, classes: Mapping[str, type], refer: Callable[[int, str], object]
    ) -> None:
        self.refer = refer
        self.made: list[object] = []
        try:
            self._make(table, classes)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadMessage(f"objects: {error}") from None

    def _make(
        self, table: list[tuple[str, dict[str, object]]], classes: Mapping[str, type]
    ) -> None:
        for name, _ in table:
            self.made.append(object.__new__(classes[name]))
        for item, (_, fields) in zip(self.made, table, strict=True):
            for field, value in fields.items():
                if isinstance(value, list) and value and value[0] == "a":
                    # an empty one is neither equal nor unequal
                    raise ValueError("an array as an attribute")
                object.__setattr__(item, field, self.decode(value))

    def decode(self, value: object) -> Any:  # noqa: ANN401 - a value of the program, of any type
        """Decode a value. Raises BadMessage for anything that ``Encoder`` does not write."""
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

    def _decode(self, value: object) -> object:
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
        decode = _DECODERS.get(tag)
        if decode is None:
            raise BadMessage(f"tag {tag!r}")
        return decode(self, value)

    def _reference(self, value: list[Any]) -> object:
        return self.refer(int(value[1]), str(value[2]))

    def _range(self, value: list[Any]) -> object:
        return range(*self._integers(value[1:]))

    def _fraction(self, value: list[Any]) -> object:
        numerator, denominator = self._integers(value[1:3])
        return fractions.Fraction(numerator, denominator)

    def _array(self, value: list[Any]) -> object:
        return _array(str(value[1]), self._decode(value[2]))

    def _integers(self, values: list[Any]) -> list[int]:
        """Return integers as ``Encoder`` writes them. A text such as ``1e3000000000`` would become
        a number with that many digits.
        """
        integers = []
        for value in values:
            decoded = self._decode(value)
            if not isinstance(decoded, int):
                raise BadMessage("not an integer")
            integers.append(decoded)
        return integers


# by tag; sequences are in _MAKERS
_DECODERS: dict[str, Callable[[Decoder, list[Any]], object]] = {
    "i": lambda decoder, value: int(value[1], 16),
    "o": lambda decoder, value: decoder.made[value[1]],
    "R": Decoder._reference,
    "c": lambda decoder, value: complex(float(value[1]), float(value[2])),
    "b": lambda decoder, value: value[1].encode("latin-1"),
    "B": lambda decoder, value: bytearray(value[1].encode("latin-1")),
    "r": Decoder._range,
    "D": lambda decoder, value: decimal.Decimal(value[1]),
    "F": Decoder._fraction,
    "a": Decoder._array,
}


def _array(kind: str, values: object) -> object:
    """Return a NumPy array of numbers or text. The item size comes from the values, never from the
    sender.
    """
    import numpy

    if kind[1:2] == "U":
        if not isinstance(values, list):
            return numpy.array(str(values))
        longest = 0
        count = 0
        for text in _leaves(values):
            if not isinstance(text, str):
                raise BadMessage("not an array of text")
            longest = max(longest, len(text))
            count += 1
        if 4 * count * longest > MAX_TEXT_ARRAY:
            raise BadMessage("too large an array of text")
        return numpy.array(values, dtype=str)
    if not _NUMBERS.fullmatch(kind):
        raise BadMessage(f"an array of {kind!r:.20}")
    return numpy.array(values, dtype=numpy.dtype(kind))


def _leaves(values: list[Any]) -> Iterator[object]:
    for value in values:
        if isinstance(value, list):
            yield from _leaves(value)
        else:
            yield value


def pack(message: object) -> bytes:
    """Return one message, preceded by its length."""
    text = json.dumps(message, separators=(",", ":"))
    body = text.encode()  # ASCII: lone surrogates are escaped and survive
    return _HEADER.pack(len(body)) + body


def write_all(pipe: int, data: bytes, seconds: float | None = None) -> None:
    """Write everything. Raises Gone if the other side has closed the pipe, TimeoutError if a
    non-blocking pipe takes nothing for ``seconds``.
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

    def read(self, seconds: float | None = None) -> Any:  # noqa: ANN401 - JSON from a stranger
        """Return the next message. Raises Gone, TooLong, BadMessage, and TimeoutError if it is not
        complete in time.
        """
        deadline = None
        if seconds is not None:
            deadline = time.monotonic() + seconds
        (size,) = _HEADER.unpack(self._take(4, deadline))
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
