"""Values cross the pipe as they are, and nothing else crosses."""

from __future__ import annotations

import collections
import decimal
import enum
import fractions
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dcpo.sandbox.guest.rpc import BadMessage, Decoder, Encoder, Unsendable


def cross(value: Any, classes: dict[str, type] | None = None) -> Any:
    encoder = Encoder(classes or (), None)
    message = json.loads(json.dumps([encoder.encode(value), encoder.objects()]))
    return Decoder(message[1], classes or {}, lambda number, kind: (number, kind)).decode(
        message[0]
    )


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
HASHABLE = st.recursive(
    SCALARS, lambda part: st.tuples(part, part) | st.frozensets(part, max_size=3), max_leaves=6
)
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3),
    lambda part: (
        st.lists(part, max_size=4) | st.tuples(part) | st.dictionaries(HASHABLE, part, max_size=3)
    ),
    max_leaves=12,
)


def exact(value: Any) -> Any:
    """Values with their types: 1, True and 1.0 are equal but not the same."""
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    return type(value), value


@given(VALUES)
def test_values_come_back_as_they_were_sent(value: Any) -> None:
    assert exact(cross(value)) == exact(value)


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63),
        2**63 - 1,
        1 << 100_000,
        -(1 << 20_000),
        [2**70, 1],
        math.inf,
        -math.inf,
        range(3, 9, 2),
        bytearray(b"x"),
        collections.deque([1, [2]]),
        decimal.Decimal("1.50"),
        fractions.Fraction(1, 3),
        {(1, 2): {3}},
        "\ud800\x00",
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_values_of_many_types(value: Any) -> None:
    assert cross(value) == value
    assert type(cross(value)) is type(value)


def test_not_a_number() -> None:
    assert math.isnan(cross([float("nan")])[0])


def test_subclasses_arrive_as_their_base() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Color(enum.IntEnum):
        RED = 1

    point = collections.namedtuple("point", "x y")
    for value, base in [
        (Liar(3), int),
        (Color.RED, int),
        (point(1, 2), tuple),
        (collections.Counter("aab"), dict),
        (collections.defaultdict(list, {1: [2]}), dict),
        (collections.OrderedDict(a=1), dict),
        (np.float64(1.5), float),
        (np.int64(3), int),
        (np.bool_(True), bool),
    ]:
        assert type(cross(value)) is base
    assert np.array_equal(cross(np.array([[1.5, 2], [3, 4]])), np.array([[1.5, 2], [3, 4]]))


class Node:
    def __init__(self, val: int, next: Node | None = None) -> None:
        self.val, self.next = val, next


def test_a_tasks_own_classes_travel_by_value_however_long_the_chain() -> None:
    head = None
    for number in range(5000):
        head = Node(number, head)
    assert head is not None
    copy = cross([head, head], {"Node": Node})
    assert copy[0] is copy[1]
    assert copy[0] is not head
    node, count = copy[0], 0
    while node:
        node, count = node.next, count + 1
    assert count == 5000
    ring = Node(1)
    ring.next = ring
    ring = cross(ring, {"Node": Node})
    assert ring.next is ring


def test_what_does_not_cross() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (object(), len, int, endless, iter([])):
        with pytest.raises(Unsendable):
            cross(value)


@pytest.mark.parametrize(
    "encoded",
    [
        {},
        [],
        ["?"],
        ["l", {}],
        ["s", ["l", 1]],
        ["d", 1],
        ["i", "x"],
        ["o", 0],
        ["o", -1],
        ["R"],
        ["c", 1],
        ["b", 1],
        ["F", 1, 0],
        ["D", "x"],
        ["r", 1, 2, 0],
        ["a", "O8", ["l", {}]],
        [["l"]],
    ],
    ids=str,
)
def test_malformed_values_are_refused(encoded: Any) -> None:
    with pytest.raises(BadMessage):
        Decoder([], {}, lambda number, kind: None).decode(encoded)


def test_unknown_classes_are_refused() -> None:
    for table in ([["Exception", {}]], [["Node", []]], [[]], 3):
        with pytest.raises(BadMessage):
            Decoder(table, {}, lambda number, kind: None)
