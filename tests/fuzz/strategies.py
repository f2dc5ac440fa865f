"""Odd text and values for the fuzzing: ``fuzz`` is the settings, ``only`` lets one kind of error
pass.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_dcpo.runtime.text import printable
from tests.helpers.hostile import HOSTILE

AT_LENGTH = int(os.environ.get("DCPO_FUZZ", "0")) // 40
fuzz = settings(
    max_examples=AT_LENGTH or (50 if settings.get_current_profile_name() == "ci" else 150),
    derandomize=not AT_LENGTH,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

FRAGMENTS = [
    "<conf>",
    " Confidence: ",
    "0.83",
    "1",
    "-0",
    "1.5",
    "\\boxed{",
    "\\boxed{5}",
    "{",
    "}",
    "\\{",
    "```",
    "~~~~",
    "```python\n",
    "\n",
    "\r\n",
    " ",
    "\t",
    "def f(x):\n return x",
    "x = 1\n",
    "####",
    "\\frac",
    "12",
    "\\sqrt[3]2",
    "^\\circ",
    "\\sin 30",
    "1,000",
    "1\\,000",
    "_{10}",
    ":",
    "3:4",
    "\\text{ cm}",
    "\\overline{3}",
    "\ud800",
    "\x1b[2J",
    "½",
    "√",
    "²",
    "数",
    "🙂",
    "e999",
    "%",
    "$",
    "=",
    "<",
    "\\in",
    "[1,2)",
    "Also output a single line",
    "CONFIDENCE",
    "<think>",
    "</think>",
]
responses = st.one_of(
    st.text(st.characters(codec=None), max_size=200),
    st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join),
    st.tuples(st.sampled_from(sorted(HOSTILE)), st.integers(1, 400)).map(
        lambda pair: HOSTILE[pair[0]](pair[1])
    ),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers().map(lambda n: n * 10**400),
    st.floats(),
    st.sampled_from(FRAGMENTS),
    st.text(st.characters(codec=None), max_size=10),
)


def values(keys: list[str]) -> st.SearchStrategy[Any]:
    """JSON values; their objects have mostly these keys."""
    names = st.sampled_from(keys) | st.text(max_size=5)
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5),
        max_leaves=20,
    )


def changed(base: Any, keys: list[str]) -> st.SearchStrategy[Any]:
    """The JSON object ``base`` with some entries, at any depth, replaced or removed."""
    edits = st.lists(
        st.tuples(st.integers(0, 1000), st.just(_REMOVED) | values(keys)), min_size=1, max_size=3
    )
    return edits.map(lambda chosen: _edited(base, chosen))


_REMOVED = object()


def _edited(base: Any, edits: list[tuple[int, Any]]) -> Any:
    root = json.loads(json.dumps(base))
    for number, value in edits:
        places = list(_places(root))
        if not places:
            break
        container, key = places[number % len(places)]
        if value is _REMOVED:
            del container[key]
        else:
            container[key] = value
    return root


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        yield value, key
        yield from _places(value[key])


def mutated(base: bytes) -> st.SearchStrategy[bytes]:
    """``base`` with a few stretches overwritten, removed, inserted or repeated."""
    edit = st.tuples(
        st.integers(0, max(1, len(base))),
        st.integers(0, 12),
        st.binary(max_size=12),
        st.integers(1, 3),
    )
    return st.lists(edit, min_size=1, max_size=4).map(lambda edits: _mutate(base, edits))


def _mutate(base: bytes, edits: list[tuple[int, int, bytes, int]]) -> bytes:
    for at, removed, inserted, times in edits:
        base = base[:at] + inserted * times + base[at + removed :]
    return base


def only(error: type[Exception], function: Callable[[], Any]) -> Any:
    """The result, None after ``error``; every other exception fails the test. The message is one
    that can be printed.
    """
    try:
        return function()
    except error as refused:
        printable(str(refused)).encode()
        return None
