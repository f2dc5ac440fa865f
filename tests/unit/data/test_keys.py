"""RowKeys of rows: read, harmless, refused by name; the others are counted and said once."""

from __future__ import annotations

import logging
import math

import pytest

from megatron_dcpo.data.keys import RowKeys, Unread, is_empty, without_empty
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


def test_nulls_of_objects_are_taken_out_at_every_depth() -> None:
    value = [{"a": None, "b": {"c": None, "d": [{"e": None, "f": 0}]}}]
    assert without_empty(value) == [{"b": {"d": [{"f": 0}]}}]
