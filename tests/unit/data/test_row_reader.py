"""The reader of rows: our names, columns, a user's function, and what it says of each source."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.data.chats import is_empty, without_empty
from megatron_dcpo.data.row_reader import (
    DEMONSTRATIONS,
    KNOWN,
    PROBLEMS,
    Purpose,
    ReadRow,
    RowOptions,
    RowReader,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import SCHEMA

ROW = {"question": "1+1?", "answer": "2"}


def read(
    *rows: dict[str, Any], purpose: Purpose = PROBLEMS, kept: bool = False, **options: Any
) -> list[ReadRow | None]:
    reader = RowReader("d.jsonl", RowOptions(**options), purpose, kept=kept)
    found = [reader.read(row, number) for number, row in enumerate(rows, start=1)]
    reader.report()
    return found


def function(tmp_path: Path, body: str) -> str:
    file = tmp_path / f"rows{abs(hash(body))}.py"
    file.write_text(f"def row(row):\n    {body}\n")
    return f"{file}:row"


@pytest.mark.parametrize(
    "value", [None, math.nan, "", " \n", [], {}, {"bytes": None, "path": None}, {"a": {"b": []}}]
)
def test_what_says_nothing(value: object) -> None:
    assert is_empty(value)


@pytest.mark.parametrize("value", [0, False, 0.0, "0", [None], {"a": 0}])
def test_what_says_something(value: object) -> None:
    assert not is_empty(value)


def test_null_values_of_a_tables_objects_go() -> None:
    tool = {"a": None, "b": [{"c": None, "d": 0}]}
    assert without_empty(tool) == {"b": [{"d": 0}]}


def test_every_known_column_is_a_name_of_the_schema() -> None:
    assert set(KNOWN) <= set(SCHEMA)
    assert PROBLEMS.names | DEMONSTRATIONS.names == set(SCHEMA)


def test_a_run_says_what_it_read_and_what_not(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**ROW, "url": "x"}, {**ROW, "url": "y", "note": " "}, ROW, {**ROW, "Level": 3}]
    with caplog.at_level(logging.INFO):
        read(*rows)
    (line,) = caplog.messages
    for part in ("d.jsonl", "4 rows", "question -> problem", "answer -> answer", "url (50 %)"):
        assert part in line
    assert "Level -> kind" in line
    assert "note" not in line


def test_unread_columns_are_refused_with_their_shares() -> None:
    rows = [{**ROW, "url": "x"}, ROW]
    with pytest.raises(UserError, match=r"d\.jsonl.*data\.unread.*url \(50 %\)"):
        read(*rows, unread="refuse")
    read(ROW, {**ROW, "url": None}, unread="refuse")
    read(*rows, unread="refuse", columns={"kind": "url"}, held_out=True)
    read(*rows, unread="refuse", kept=True)
    read(*rows, unread="refuse", order="url")


@pytest.mark.parametrize(
    ("name", "purpose"),
    [
        *((name, PROBLEMS) for name in ("input", "weight", "label", "Instruction", "history")),
        *((name, DEMONSTRATIONS) for name in ("input", "Loss", "loss_mask", "functions")),
    ],
)
def test_what_changes_a_run_is_refused_where_it_is_not_read(name: str, purpose: Purpose) -> None:
    row = {**ROW, name: "3"}
    with pytest.raises(UserError, match=rf"row 1: .*{name}.*data\.row"):
        read(row, purpose=purpose)
    read({**row, "question": "2+3?"}, {**row, name: None}, purpose=purpose)
    read(row, purpose=purpose, kept=True)


@pytest.mark.parametrize("name", ["image", "Audio", "video_url", "images_0", "image_paths"])
def test_what_is_no_text_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=rf"row 1: .*{name}"):
        read({**ROW, name: "x"}, kept=True)
    read({**ROW, name: False, "has_image": True, "imagery": "x", "num_images": 2})


def test_columns_are_named_and_left_out() -> None:
    row = {**ROW, "context": "old", "facts": '{"text": ["A."]}', "input": "x"}
    (named,) = read(row, columns={"context": "facts.text"})
    assert named is not None
    assert named.row.context == ["A."]
    (left_out,) = read(row, columns={"context": ""})
    assert left_out is not None
    assert left_out.row.context is None
    assert left_out.columns["input"] == "x"
    with pytest.raises(UserError, match=r"row 1 .*'facts\.none'.*data\.columns"):
        read(row, columns={"context": "facts.none"})
    (as_it_is,) = read(ROW, columns={"problem": "text"}, held_out=True)
    assert as_it_is is not None
    assert as_it_is.row.problem == "1+1?"


def test_a_function_reads_the_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = function(
        tmp_path, "return {'problem': row['q'], 'answer': row.get('a')} if row['q'] else None"
    )
    rows = [{"q": "1?", "a": 1, "image": "x", "input": "y"}, {"q": "", "a": 2}]
    with caplog.at_level(logging.INFO):
        one, other = read(*rows, row=path)
    assert one is not None
    assert (one.row.problem, one.row.answer, other) == ("1?", 1, None)
    assert one.has == {"problem", "answer"}
    (line,) = caplog.messages
    for part in ("q, a -> problem, answer", "image (50 %)", "input (50 %)", "data.row: 1 rows"):
        assert part in line
    with pytest.raises(UserError, match=r"image \(50 %\)"):
        read(*rows, row=path, unread="refuse")
    everything = function(tmp_path, "return {'problem': str({**row}), 'answer': 1}")
    read(*rows, row=everything, unread="refuse")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("return row['none']", "KeyError"),
        ("return ['a']", "list"),
        ("return {'problm': 'a'}", "problem"),
        ("raise ValueError('odd')", "odd"),
    ],
)
def test_a_function_that_fails_is_one_line(tmp_path: Path, body: str, named: str) -> None:
    reader = RowReader("d.jsonl", RowOptions(row=function(tmp_path, body)), PROBLEMS)
    with pytest.raises(UserError, match=rf"d\.jsonl: row 2: data\.row=.*{named}") as caught:
        reader.read(ROW, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["rows.py:row", "math:pi", "nowhere:row"])
def test_a_function_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(UserError, match=r"data\.row"):
        read(ROW, row=path)
