"""Which programs are the same text: layout, comments and local names aside, and nothing else."""

from __future__ import annotations

import pytest

from megatron_dcpo.judging.same_program import normal_form, same_program


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("x=1\nprint(x)", "# first\ny = 1\n\nprint( y )\n"),
        (
            'def f(a):\n    """Doc."""\n    t = a\n    return t',
            "def f(a):\n  total = a  # sum\n  return total",
        ),
        (
            "def f(a: int) -> int:\n    s: int = a\n    return s",
            "def f(a):\n    r = a\n    return r",
        ),
        ("for i in range(3):\n    print(i)", "for k in range(3):\n    print(k)"),
        ("print([v for v in range(3)])", "print([w for w in range(3)])"),
        ("not python at all", "not python at all\n"),
    ],
)
def test_programs_that_differ_in_layout_are_the_same(a: str, b: str) -> None:
    assert same_program(a, b)
    assert same_program(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("def f(a): return a", "def g(a): return a"),
        ("def f(a, b): return a", "def f(b, a): return b"),  # called by keyword, these differ
        ("def f(a, b): return a", "def f(a, b): return b"),
        ("x = 1\ny = 2\nprint(x)", "x = 1\ny = 2\nprint(y)"),
        ("total = 0\nprint(sum([1]))", "sum = 0\nprint(sum([1]))"),
        ("import math\nprint(math.pi)", "import cmath\nprint(cmath.pi)"),
        ("class A:\n    x = 1\nprint(A().x)", "class A:\n    y = 1\nprint(A().x)"),
        (
            "def f(*, k): return k\nk = 1\nprint(f(k=k))",
            "def f(*, k): return k\nj = 1\nprint(f(j=j))",
        ),
        ("x = 1", "x = 1.0"),
        ("print('a')", "print('b')"),
        ("", "x = 1"),
    ],
)
def test_programs_that_do_something_else_differ(a: str, b: str) -> None:
    assert not same_program(a, b)


@pytest.mark.parametrize(
    "text",
    [
        "-" * 15_000 + "1",
        "+".join("1" * 9000),
        "a" + ".b" * 9000,
        "(" * 9000,
        "\x00",
        "def f(:\n",
        "f'{" * 3000,
        "x" * 10**6,
    ],
    ids=range(8),
)
def test_hostile_texts_are_compared_as_they_are(text: str) -> None:
    assert same_program(text, text + " ") or len(text) > 20_000
    assert normal_form(text) == text.strip()
