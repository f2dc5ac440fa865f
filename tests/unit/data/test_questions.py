"""Questions with options or with aliases, read from files as their publishers write them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from megatron_dcpo.data.benchmarks import load_benchmark
from megatron_dcpo.data.datasets import load_records, message_prompts
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.errors import UserError

GPQA = [
    {
        "Record ID": f"r{number}",
        "Question": f'What is "{number}",\nplus zero?',
        "Correct Answer": str(number),
        **{f"Incorrect Answer {k}": str(number + k) for k in (1, 2, 3)},
        "Subdomain": "Arithmetic, simple",
    }
    for number in range(40)
]
MMLU = {
    "question_id": 70,
    "question": "Which one is a prime?",
    "options": ["4", "6", "8", "9", "7"],
    "answer": "E",
    "answer_index": 4,
    "category": "math",
    "src": "x",
}
TRIVIA = {
    "question": "Who wrote The Waste Land?",
    "question_id": "tc_1",
    "answer": {
        "aliases": ["T. S. Eliot", "Eliot"],
        "normalized_aliases": ["t s eliot", "eliot"],
        "type": "WikipediaEntity",
        "value": "T. S. Eliot",
    },
}
OFFICIAL = {
    "Data": [
        {
            "Answer": {
                "Aliases": ["T. S. Eliot", "Eliot"],
                "NormalizedValue": "t s eliot",
                "Value": "T. S. Eliot",
            },
            "Question": "Who wrote The Waste Land?",
            "QuestionId": "tc_1",
            "SearchResults": [{"Title": "long"}],
        }
    ],
    "Domain": "unfiltered",
    "Version": 1.0,
}
HOTPOT = {
    "_id": "5a8b",
    "answer": "Chief of Protocol",
    "question": "Which office did she hold?",
    "supporting_facts": [["Kiss and Tell", 0]],
    "context": [["Kiss and Tell", ["A long text."]]],
    "type": "bridge",
    "level": "hard",
}


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_gpqa_is_shuffled_the_same_way_every_time(tmp_path: Path) -> None:
    path = table(tmp_path / "gpqa_diamond.csv", GPQA)
    loaded = load_benchmark("GPQA-diamond", tmp_path)
    (warning,) = loaded.warnings
    for named in ("gpqa", "40 problems", "198", str(path)):
        assert named in warning
    first = loaded.records[0]
    assert first.problem.startswith('What is "0",\nplus zero?\n\nA. ')
    assert (first.form, first.kind) == ("choice", "Arithmetic, simple")
    for number, record in enumerate(loaded.records):
        options = record.row["options"]
        assert sorted(map(int, options)) == list(range(number, number + 4))
        assert options["ABCD".index(record.answer)] == str(number), (
            "the letter is the right option's"
        )
    assert {record.answer for record in loaded.records} == set("ABCD")
    assert load_benchmark("gpqa", tmp_path).records == loaded.records
    # a row keeps its order whatever stands behind it
    table(path, GPQA[:3])
    assert load_benchmark("gpqa", tmp_path).records == loaded.records[:3]


def test_mmlu_pro(tmp_path: Path) -> None:
    lines(tmp_path / "mmlupro.jsonl", MMLU)
    (record,) = load_benchmark("MMLU-Pro", tmp_path).records
    assert record.problem == "Which one is a prime?\n\nA. 4\nB. 6\nC. 8\nD. 9\nE. 7"
    assert (record.answer, record.form, record.kind) == ("E", "choice", "math")
    assert record.row == {"answer": "E", "options": ["4", "6", "8", "9", "7"]}
    (tmp_path / "mmlupro").mkdir()
    parquet.write_table(pa.Table.from_pylist([MMLU]), tmp_path / "mmlupro" / "test.parquet")
    assert load_benchmark("mmlupro", tmp_path).records == (record,)
    letters = load_records(
        lines(tmp_path / "own.jsonl", {"question": "?", "options": ["x", "y"], "answer": "B"})
    )
    assert (letters[0].answer, letters[0].form) == ("B", "choice")


@pytest.mark.parametrize("indent", [None, 2])
def test_triviaqa(indent: int | None, tmp_path: Path) -> None:
    (tmp_path / "unfiltered-web-dev.json").write_text(json.dumps(OFFICIAL, indent=indent))
    (official,) = load_benchmark(f"triviaqa={tmp_path / 'unfiltered-web-dev.json'}").records
    assert (official.problem, official.answer, official.form) == (
        TRIVIA["question"],
        "T. S. Eliot",
        "short",
    )
    assert "SearchResults" not in official.row
    parquet.write_table(pa.Table.from_pylist([TRIVIA]), tmp_path / "triviaqa.parquet")
    (hub,) = load_benchmark("triviaqa", tmp_path).records
    assert (hub.problem, hub.answer) == (official.problem, official.answer)
    assert load_records(lines(tmp_path / "t.jsonl", TRIVIA), "triviaqa") == [hub]


def test_hotpotqa_is_closed_book(tmp_path: Path) -> None:
    (tmp_path / "hotpotqa").mkdir()
    (tmp_path / "hotpotqa" / "hotpot_dev_fullwiki_v1.json").write_text(json.dumps([HOTPOT]))
    (record,) = load_benchmark("hotpotqa", tmp_path).records
    assert (record.problem, record.answer, record.form) == (
        HOTPOT["question"],
        HOTPOT["answer"],
        "short",
    )
    assert record.row == {"answer": HOTPOT["answer"]}
    assert record.kind == "bridge"


def test_a_users_verifier_gets_all_columns(tmp_path: Path) -> None:
    (record,) = load_records(lines(tmp_path / "m.jsonl", MMLU), keep_columns=True)
    assert record.row == {**MMLU, "data_source": "m", "problem": record.problem, "answer": "E"}
    (record,) = load_records(lines(tmp_path / "t.jsonl", TRIVIA), keep_columns=True)
    assert (record.row["answer"], record.form) == (TRIVIA["answer"], "short")


def test_the_form_of_the_answer_is_asked_for(tmp_path: Path) -> None:
    letter, name = (
        load_records(lines(tmp_path / f"{n}.jsonl", row))
        for n, row in enumerate((MMLU, TRIVIA), start=1)
    )
    for records, words in (
        (letter, "the letter of the right option"),
        (name, "a name or a few words"),
    ):
        text = message_prompts(records, "paper")[0].messages[-1]["content"]
        assert f"{words}" in text
        assert text.count("\\boxed{}") == 1
        assert text.endswith("<conf> Confidence: 0.83\nWrite nothing after it.")
        assert "I don't know" not in text
        allowed = message_prompts(records, "abstain")[0].messages[-1]["content"]
        assert "\\boxed{I don't know}" in allowed
        assert (
            allowed.replace(
                "\nIf you do not know the answer, do not guess: put \\boxed{I don't know}.", ""
            )
            == text
        )
        assert words in message_prompts(records, "grpo")[0].messages[-1]["content"]
        assert message_prompts(records, "raw")[0].messages[-1]["content"] == records[0].problem


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (without(GPQA[0], "Incorrect Answer 2"), "an option must be a text, got None"),
        (GPQA[0] | {"Question": " "}, "problem"),
        (without(MMLU, "question"), "has no problem"),
        (MMLU | {"answer": 5}, "5 is none of its 5 options"),
        (MMLU | {"answer": -1}, "-1 is none of its 5 options"),
        (MMLU | {"answer": "F"}, "'F' is none of its 5 options"),
        (MMLU | {"options": [None, "1", "2", "3", "4"]}, "got None"),
        (MMLU | {"options": ["x"] * 27}, "27 options; expected at most 26"),
        (TRIVIA | {"answer": {"value": "", "aliases": []}}, "the answer has no text"),
        (without(TRIVIA, "question"), "has no problem"),
        (HOTPOT | {"answer": ""}, "the answer has no text"),
        (without(HOTPOT, "question"), "has no problem"),
        (without(HOTPOT, "answer"), "has no answer"),
    ],
)
def test_odd_rows_are_one_line_with_file_and_row(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = lines(tmp_path / "odd.jsonl", {"problem": "1+1", "answer": "2"}, row)
    with pytest.raises(UserError) as error:
        load_records(path)
    assert str(error.value).startswith(f"{path}: row 2")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3\n", ":3: 1 values for 2 columns; quote values that hold commas"),
        ("a,b\n1,2,3\n", ":2: 3 values for 2 columns"),
        ('a,b\n1,"2\n', "not a readable CSV file (unexpected end of data)"),
        ('a,b\n1,"2"3\n', ":2: not a readable CSV file"),
    ],
)
def test_broken_tables_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError) as error:
        list(read_rows(tmp_path / "t.csv"))
    assert message in str(error.value)


def test_tables(tmp_path: Path) -> None:
    """A byte order mark, line ends of Windows, line ends and commas in quotes, blank lines."""
    (tmp_path / "t.csv").write_bytes(
        '\ufeffproblem,answer\r\n"a, ""b""\r\nc",1\r\n\r\nd,\r\n'.encode()
    )
    assert list(read_rows(tmp_path / "t.csv")) == [
        {"problem": 'a, "b"\r\nc', "answer": "1"},
        {"problem": "d", "answer": ""},
    ]
    assert [record.answer for record in load_records(tmp_path / "t.csv")] == ["1"]
    (tmp_path / "one.json").write_text('{\n"Data": 1}')
    assert list(read_rows(tmp_path / "one.json")) == [{"Data": 1}]
