"""RowKeys of rows: read, harmless, refused by name; the others are counted and said once."""

from __future__ import annotations

import logging
import math

import pytest

from megatron_dcpo.data.unread_columns import (
    RowKeys,
    Unread,
    is_empty,
    is_media,
    shows,
    without_empty,
)
from megatron_dcpo.errors import UserError

KEYS = RowKeys(
    "column", read=frozenset({"text"}), harmless=frozenset({"note"}), refused={"mask": "x"}
)


@pytest.mark.parametrize(
    "value",
    [None, math.nan, "", " \n", [], {}, {"bytes": None, "path": None}, {"a": {"b": []}}],
)
def test_what_says_nothing(value: object) -> None:
    assert is_empty(value)


@pytest.mark.parametrize("value", [0, False, 0.0, "0", [None], {"a": 0}])
def test_what_says_something(value: object) -> None:
    assert not is_empty(value)


def test_every_key_is_read_harmless_refused_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    unread = Unread("d.jsonl")
    row = {"text": "1", "Note": "2", "id": 3, "problem_id": 4, "_hash": 5, "mask": None, "odd": ""}
    unread.take(row, KEYS, 1)
    assert unread.counts() == {}
    unread.take({"odd": 0, "Text": "x"}, KEYS, 2)
    unread.take({"odd": 0, "used": 1}, KEYS, 5, used=("used",))
    assert unread.counts() == {"odd": (2, 2), "Text": (1, 2)}
    with caplog.at_level(logging.WARNING):
        unread.report()
    assert len(caplog.messages) == 1
    assert "'odd'" in caplog.messages[0]
    with pytest.raises(UserError, match=r"row 7.*'Mask'"):
        unread.take({"Mask": 1}, KEYS, 7)


@pytest.mark.parametrize(
    "key",
    ["image", "Images", "image_1", "image2", "decoded_image", "image_url", "img_path", "video_id"],
)
def test_what_is_seen_or_heard_is_refused_by_every_reader(key: str) -> None:
    unread = Unread("d.jsonl")
    with pytest.raises(UserError, match=rf"row 3.*{key!r}"):
        unread.take({key: "a.png"}, KEYS, 3)
    unread.take({key: None}, KEYS, 4)
    unread.take({key: False}, KEYS, 5)
    assert is_media(key)


@pytest.mark.parametrize("key", ["num_images", "has_image", "imagery", "video_length", "id"])
def test_counts_of_images_are_no_images(key: str) -> None:
    assert not is_media(key)


@pytest.mark.parametrize(
    ("text", "part", "is_shown"),
    [
        ("Translate: cat", "cat", True),
        ("Concatenate", "cat", False),
        ("What is f(x)?", "(x)", True),
        ("2+21", "2", True),
        ("21", "2", False),
        ("any", "", False),
    ],
)
def test_a_text_shows_whole_words_and_numbers(text: str, part: str, is_shown: bool) -> None:
    assert shows(text, part) is is_shown


def test_nulls_of_objects_are_taken_out_at_every_depth() -> None:
    value = [{"a": None, "b": {"c": None, "d": [{"e": None, "f": 0}]}}]
    assert without_empty(value) == [{"b": {"d": [{"f": 0}]}}]
