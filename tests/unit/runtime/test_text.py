"""Text of others: what of it reaches a terminal, and what JSON may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import DEEPEST, encodable, parse_json, printable, read_json_object

UNSAFE = [
    *range(0x20),
    *range(0x7F, 0xA0),
    0x61C,
    0x200E,
    0x200F,
    *range(0x2028, 0x202F),
    *range(0x2066, 0x206A),
    0xD800,
]


def test_what_steers_a_terminal_is_escaped() -> None:
    for code in UNSAFE:
        shown = printable(f"a{chr(code)}b")
        assert shown.isprintable(), hex(code)
        assert shown.startswith("a\\")
        shown.encode()
    assert printable("größer 数学 🙂 \\x1b \u00a0") == "größer 数学 🙂 \\x1b \u00a0"
    assert printable("\x1b]52;c;\x07\u202e\ud800") == r"\x1b]52;c;\x07\u202e\ud800"
    assert printable("a\n\tb\r\x1b", lines=True) == "a\n\tb\\r\\x1b"


def nested(depth: int, kind: str) -> str:
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("kind", ["list", "object"])
def test_depth_is_bounded(kind: str) -> None:
    parse_json(nested(DEEPEST, kind))
    for depth in (DEEPEST + 1, 500, 10**5):
        with pytest.raises(ValueError, match="levels deep"):
            parse_json(nested(depth, kind))
    assert len(parse_json("[" + ",".join(["[]"] * 1000) + "]")) == 1000, (
        "many brackets are not depth"
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'{"\ud800": ["\udfff", "\ud83d\ude00"]}', {"\ufffd": ["\ufffd", "\U0001f600"]}),
        ('"\ud800"', "\ufffd"),
        ("[NaN]", None),
        (r'"\\ud800"', r"\ud800"),
    ],
)
def test_strings_can_be_written(text: str, value: Any) -> None:
    found = parse_json(text)
    assert value is None or found == value
    json.dumps(found, ensure_ascii=False).encode()
    assert encodable("a\udc80") == "a\ufffd"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", ":1: not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[1]", "not a JSON object but list"),
        (b"[" * 9999, "levels deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_object_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"config\.json.*{said}"):
        read_json_object(path)
    with pytest.raises(UserError, match="No such file"):
        read_json_object(tmp_path / "none")
