"""The passage of a question is part of its problem: put before it, left out by name, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.data.benchmarks import load_benchmark
from megatron_dcpo.data.datasets import Record, load_records
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.training.sources import load_sources
from tests.helpers.paths import QUICKSTART
from tests.helpers.tokenizers import ByteTokenizer

SQUAD = {
    "id": "5",
    "context": "The Normans were in Normandy.\n",
    "question": "Where were the Normans?",
    "answers": {"text": ["Normandy", "in Normandy"], "answer_start": [20, 17]},
}
ANSWERS = {"answer": "answers.text"}
SHOWN = "The Normans were in Normandy.\n\nWhere were the Normans?"
PLAIN = {"question": "Who?", "answer": "Ann"}
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def loaded(
    tmp_path: Path, *rows: dict[str, Any], columns: dict[str, str] | None = None, **other: Any
) -> list[Record]:
    reading = RowOptions(columns=columns or {})
    return load_records(write(tmp_path / "rows.jsonl", *rows), reading=reading, **other)


def test_the_passage_is_before_the_question(tmp_path: Path) -> None:
    (record,) = loaded(tmp_path, SQUAD, columns=ANSWERS)
    assert record.problem == SHOWN
    assert record.answer == "Normandy"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**PLAIN, "context": "Ann did."}, "Ann did.\n\nWho?"),
        ({**PLAIN, "Context": "Ann did."}, "Ann did.\n\nWho?"),
        ({**PLAIN, "context": ["Ann did. ", "Bo not."]}, "Ann did.\n\nBo not.\n\nWho?"),
        ({**PLAIN, "context": None}, "Who?"),
        ({**PLAIN, "context": " "}, "Who?"),
        ({**PLAIN, "context": float("nan")}, "Who?"),
        ({**PLAIN, "context": []}, "Who?"),
        ({"answer": "Ann", "input": "A.", "instruction": "Who?"}, "Who?\nA."),
    ],
)
def test_known_columns(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (record,) = loaded(tmp_path, row)
    assert record.problem == problem


def test_an_input_beside_a_question_is_refused_or_named(tmp_path: Path) -> None:
    """Beside ``instruction`` its form is known (Alpaca); beside a question it is not."""
    row = {**PLAIN, "input": "Ann did."}
    with pytest.raises(UserError, match=r"row 1.*'input'.*context: input"):
        loaded(tmp_path, row)
    (record,) = loaded(tmp_path, row, columns={"context": "input"})
    assert record.problem == "Ann did.\n\nWho?"
    (record,) = loaded(tmp_path, row, columns={"context": ""})
    assert record.problem == "Who?"
    (record,) = loaded(tmp_path, {**row, "question": "Who did in 'Ann did.'?"})
    assert record.problem == "Who did in 'Ann did.'?"


def test_a_question_that_shows_its_passage_is_not_given_it_twice(tmp_path: Path) -> None:
    """Apart from white space, and in any message."""
    shown = {"question": "Read: Ann\n did. Who?", "answer": "A", "context": "Ann did."}
    system = {"prompt": [{**CHAT[0], "content": "Ann did."}, CHAT[1]], "answer": "A"}
    records = loaded(tmp_path, shown, {**system, "context": "Ann did."})
    assert [record.problem for record in records] == ["Read: Ann\n did. Who?", "Who?"]


def test_messages_get_the_passage_in_the_last_one(tmp_path: Path) -> None:
    row = {"prompt": CHAT, "answer": "A", "context": "Ann did."}
    (record,) = loaded(tmp_path, row)
    assert record.messages == (CHAT[0], {**CHAT[1], "content": "Ann did.\n\nWho?"})


def test_options_stay_after_the_question(tmp_path: Path) -> None:
    """RACE's row: article, question, options, answer."""
    row = {"article": "Ann did.", "question": "Who?", "options": ["Bo", "Ann"]}
    (record,) = loaded(tmp_path, {**row, "answer": "B"}, columns={"context": "article"})
    assert record.problem == "Ann did.\n\nWho?\n\nA. Bo\nB. Ann"
    assert (record.answer, record.form) == ("B", "choice")


def test_a_users_verifier_sees_the_problem_as_asked(tmp_path: Path) -> None:
    (record,) = loaded(tmp_path, SQUAD, keep_columns=True)
    assert record.row is not None
    assert record.row["problem"] == SHOWN
    assert record.row["question"] == SQUAD["question"]
    assert record.row["context"] == SQUAD["context"]


def test_a_column_is_named_or_left_out(tmp_path: Path) -> None:
    row = {**PLAIN, "context": "old", "facts": {"text": "Ann did."}}
    for name, problem in (
        ("facts.text", "Ann did.\n\nWho?"),
        ("context", "old\n\nWho?"),
        ("", "Who?"),
    ):
        (record,) = loaded(tmp_path, row, columns={"context": name})
        assert record.problem == problem
    with pytest.raises(UserError, match=r"row 1 .*'evidence'"):
        loaded(tmp_path, row, columns={"context": "evidence"})


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({**PLAIN, "context": {"contexts": ["A."]}}, r"context"),
        ({**PLAIN, "Context": [["Ann", ["did"]]]}, r"context"),
        ({**PLAIN, "context": 7}, r"context.*7"),
    ],
)
def test_what_is_no_one_text_is_refused(row: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"row 2\b.*{named}.*data\.columns") as refused:
        loaded(tmp_path, PLAIN, row)
    assert "\n" not in str(refused.value)
    assert loaded(tmp_path, row, columns={"context": ""})[0].problem == "Who?"


def test_hotpotqa_is_asked_without_its_articles(tmp_path: Path) -> None:
    row = {
        **PLAIN,
        "supporting_facts": {"title": ["Ann"], "sent_id": [0]},
        "context": {"title": ["Ann"], "sentences": [["Ann did."]]},
    }
    assert loaded(tmp_path, row)[0].problem == "Who?"


@pytest.mark.parametrize(
    "media", [{"image": {"bytes": "x", "path": None}}, {"images": ["a.png"]}, {"Audio": "a.wav"}]
)
def test_rows_with_an_image_are_refused(tmp_path: Path, media: dict[str, Any]) -> None:
    rows = [{**PLAIN, "image": None}, {**PLAIN, "images": []}, {**PLAIN, "image": False}]
    assert len(loaded(tmp_path, *rows)) == 3
    with pytest.raises(UserError, match=r"rows\.jsonl: row 2\b.*data\.row"):
        loaded(tmp_path, PLAIN, {**PLAIN, **media})


def test_training_and_benchmark_ask_the_same(tmp_path: Path) -> None:
    path = write(tmp_path / "squad.jsonl", SQUAD)
    overrides = [
        f"data.path={path}",
        "data.columns={answer: answers.text}",
        "data.max_prompt_length=200",
        "judging.verifier=exact",
    ]
    config = load_config(QUICKSTART / "dcpo.yaml", overrides)
    (source,) = load_sources(config, ByteTokenizer())  # type: ignore[arg-type]
    benchmark = load_benchmark(f"own={path}", reading=RowOptions(config.data.columns))
    assert source.prompts[0].problem == benchmark.records[0].problem == SHOWN
    left_out = load_config(QUICKSTART / "dcpo.yaml", [*overrides, "data.columns.context="])
    (source,) = load_sources(left_out, ByteTokenizer())  # type: ignore[arg-type]
    assert source.prompts[0].problem == SQUAD["question"]


@pytest.mark.parametrize("override", ["data.columns={contxt: a}", "data.row=rows.py"])
def test_columns_have_names_of_the_schema(override: str) -> None:
    with pytest.raises(UserError, match=override.partition("=")[0]):
        load_config(QUICKSTART / "dcpo.yaml", [override])
