"""Which block of a response is the program, and where the confidence begins behind it."""

from __future__ import annotations

import pytest

from megatron_dcpo.judging.answers import extract_program, find_marker_after_program

F = "```"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        (f"{F}python\na\n{F}", "a"),
        (f"{F}py\na\n{F}", "a"),
        (f"{F}Python3\na\n{F}\n", "a"),
        (f"{F}\na\n{F}", "a"),
        ("~~~\na\n~~~", "a"),
        ("~~~python\na\n```\n~~~", "a\n```"),
        (f"{F}python\na\n{F}\nbetter:\n{F}python\nb\n{F}\n<conf> Confidence: 0.5", "b"),
        (f"{F}python\na\n{F}\n{F}python\nb", "a"),
        (f"{F}python\na", None),
        (f"{F}python\na\n{F}\n{F}bash\npython a.py\n{F}", "a"),
        (f"{F}text\na\n{F}", None),
        (f"{F}python\r\na\r\nb\r\n{F}\r\n", "a\nb"),
        (f"1. so\n   {F}python\n   if x:\n       y\n   {F}", "if x:\n    y"),
        (f"{F}{F}python\na\n{F}\nb\n{F}{F}", f"a\n{F}\nb"),
        (f"{F}python title=x\na\n{F}", "a"),
        (f"inline {F}a{F} only", None),
        ("", None),
        ("a", None),
        (f"{F}python\n{F}", ""),
        (f"{F}python\na\n{F}\n<conf> Confidence: 0.5\n{F}python\nb\n{F}", "a"),
        (f"<conf> Confidence: {F}python\nb\n{F}", None),
        (f"<conf> 0.5\n{F}python\nb\n{F}", None),
        (f"{F}python\nprint('<conf>')\n{F}\n<conf> 0.5", "print('<conf>')"),
        (f"{F}python\nprint('<conf>')\n{F}", "print('<conf>')"),
        (f"{F}python\nprint('é', '\ud800')\n{F}", "print('é', '\ud800')"),
    ],
)
def test_the_last_fenced_block_is_the_program(response: str, program: str | None) -> None:
    assert extract_program(response) == program


def test_the_confidence_begins_behind_the_fence() -> None:
    content = b"I will say <conf>.\n```python\nx = '<conf>'\n```\n<conf> Confidence: 0.7"
    assert find_marker_after_program(content, b"<conf>") == content.rindex(b"<conf>")
    assert find_marker_after_program(b"```python\nx\n```\n", b"<conf>") is None
    assert find_marker_after_program(b"no program <conf> 0.2", b"<conf>") == 11


def test_long_texts_take_linear_time() -> None:
    assert extract_program("```python\n" * 200_000) is None
    assert extract_program("```python\nx\n" + "y\n" * 1_000_000 + "```").count("y") == 1_000_000  # type: ignore[union-attr]
