"""Answers and options in the forms of public data sets, in rows of their own shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.data.answer_keys import answer_of
from megatron_dcpo.data.datasets import load_records
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.problems import load_problems

OPTIONS = ("21", "21.5", "22", "22.5")


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("raw", "texts"),
    [
        ("Bob", ["Bob"]),
        (" 42 ", ["42"]),
        (42, ["42"]),
        (42.0, ["42"]),
        (0.5, ["0.5"]),
        (None, []),
        ("", []),
        (float("nan"), []),
        (["Bob", "Robert", "Bob"], ["Bob", "Robert"]),
        ([1, 2.5], ["1", "2.5"]),
        ('["Bob", "Robert"]', ["Bob", "Robert"]),
        ("['Bob', 'Robert']", ["Bob", "Robert"]),
        ({"value": "Bob", "aliases": ["Bobby", "Bob"]}, ["Bob", "Bobby"]),
        ({"Value": "Bob", "Aliases": ["Bobby"], "NormalizedValue": "b"}, ["Bob", "Bobby"]),
        ({"aliases": []}, []),
        # mathematics, which only looks like JSON
        ("[1, 2]", ["[1, 2]"]),
        ("{1, 2}", ["{1, 2}"]),
        ("[0, 1)", ["[0, 1)"]),
        ("{'a', 'b'}", ["{'a', 'b'}"]),
        ("{}", ["{}"]),
        ("[]", ["[]"]),
    ],
)
def test_forms_of_an_answer(raw: object, texts: list[str]) -> None:
    assert list(answer_of(raw, "row 1").texts) == texts


@pytest.mark.parametrize(
    "raw",
    [
        {"target": 98, "numbers": [44, 19, 35]},
        '{"target": 98, "numbers": [44, 19, 35]}',
        {"target": "5"},
        {"number": "5", "spans": []},
        {},
        [["a"], ["b"]],
        [{"text": "a"}],
        b"bytes",
        {1, 2},
    ],
)
def test_what_is_not_understood_is_refused_with_the_forms_that_are(raw: object) -> None:
    with pytest.raises(UserError, match=r"rows: row 3: .*a list of texts.*data.row") as caught:
        answer_of(raw, "rows: row 3")
    assert "\n" not in str(caught.value)


def test_a_row_with_an_object(tmp_path: Path) -> None:
    """Search-R1 and Skywork-OR1."""
    search = {
        "data_source": "searchR1_nq",
        "prompt": [{"role": "user", "content": "Who?"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Bob", "Rob"]}},
    }
    skywork = {
        "prompt": [{"role": "user", "content": "1/2?"}],
        "reward_model": {"style": "rule", "ground_truth": '["\\\\frac{1}{2}"]'},
    }
    reading = RowOptions(columns={"answer": "reward_model.ground_truth.target"})
    (first,) = load_records(lines(tmp_path / "a.jsonl", search), reading=reading)
    assert (first.answer, first.row) == ("Bob", {"answer": ["Bob", "Rob"]})
    (second,) = load_records(lines(tmp_path / "b.jsonl", skywork))
    assert (second.answer, second.row) == ("\\frac{1}{2}", None)


COUNTDOWN = {
    "prompt": "Use 1 2 3",
    "reward_model": {"ground_truth": {"target": 6, "numbers": [1, 2, 3]}},
}


def test_a_users_verifier_gets_any_answer_as_it_is(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", COUNTDOWN)
    with pytest.raises(UserError, match=r"a\.jsonl: row 1: .*target"):
        load_records(path)
    (record,) = load_records(path, keep_columns=True)
    assert record.row is not None
    assert record.row["answer"] == {"target": 6, "numbers": [1, 2, 3]}
    assert json.loads(record.answer) == record.row["answer"]


def test_several_answers_are_not_for_math(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"question": "Who?", "answer": ["Bob", "Rob"]})
    with pytest.raises(UserError, match=r"a/0.*judging\.verifier=math"):
        load_problems(f"a={path}", JudgingConfig())
    (problems,) = load_problems(f"a={path}", JudgingConfig(verifier="exact"))
    assert problems.verifier == "exact"


WITH_OPTIONS: dict[str, Any] = {
    "MMLU": {"question": "Which?", "subject": "algebra", "choices": list(OPTIONS), "answer": 1},
    "MMLU-Pro": {"question": "Which?", "options": list(OPTIONS), "answer": "B", "answer_index": 1},
    "MedQA": {
        "question": "Which?",
        "options": dict(zip("ABCD", OPTIONS, strict=True)),
        "answer": "B",
        "meta_info": "step1",
    },
    "JSON text": {"question": "Which?", "options": json.dumps(OPTIONS), "answer": "B"},
    "numbers": {"question": "Which?", "choices": [21, 21.5, 22, 22.5], "answer": "21.5"},
    "an index of a column with gaps": {
        "question": "Which?",
        "options": list(OPTIONS),
        "answer": 1.0,
    },
    "shown already": {
        "question": "Which?\n\nA. 21\nB. 21.5\nC. 22\nD. 22.5",
        "options": list(OPTIONS),
        "answer": "B",
    },
    "prompt": {"prompt": "Which?", "choices": list(OPTIONS), "answer": "B"},
    "messages": {
        "prompt": [{"role": "user", "content": "Which?"}],
        "options": list(OPTIONS),
        "reward_model": {"ground_truth": "B"},
    },
    "parquet": {
        "question": "Which?",
        "options": {**dict(zip("ABCD", OPTIONS, strict=True)), "E": None},
        "answer": "B",
    },
}


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_options_are_shown_and_the_key_is_a_letter(name: str, tmp_path: Path) -> None:
    (record,) = load_records(lines(tmp_path / "a.jsonl", WITH_OPTIONS[name]))
    assert record.problem == "Which?\n\nA. 21\nB. 21.5\nC. 22\nD. 22.5"
    assert (record.answer, record.form) == ("B", "choice")
    assert record.row == {"answer": "B", "options": list(OPTIONS)}
    (problems,) = load_problems(f"a={tmp_path / 'a.jsonl'}", JudgingConfig())
    assert problems.verifier == "choice"


@pytest.mark.parametrize(
    "row",
    [
        {"question": "?", "options": "3 or 4", "answer": "B"},
        {"question": "?", "options": {"first": "3", "second": "4"}, "answer": "B"},
        {"question": "?", "options": {"text": ["3", "4"], "label": ["A"]}, "answer": "A"},
        {"question": "?", "options": {"text": ["3", "4"], "label": ["A", "A"]}, "answer": "A"},
        {"question": "?", "options": 4, "answer": "B"},
        {"question": "?", "options": [["3"], ["4"]], "answer": "B"},
        {"question": "?", "choices": ["3", "4"], "answer": 2},
        {"question": "?", "choices": ["3", "4"], "answer": True},
        {"question": "?", "choices": ["3", "4"], "answer": "5"},
        {"question": "?", "choices": ["3", "3"], "answer": "3"},
        {"question": "?", "choices": ["3", "4"]},
    ],
)
def test_options_that_are_not_understood_are_refused(row: Any, tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"question": "1?", "answer": "1"}, row)
    with pytest.raises(UserError) as caught:
        load_records(path)
    assert str(caught.value).startswith(f"{path}: row 2")
    assert "\n" not in str(caught.value)
    # a user's verifier may know what they are
    assert len(load_records(path, keep_columns=True)) == 2 or "answer" not in row


def test_empty_options_are_none(tmp_path: Path) -> None:
    rows = [{"question": "1?", "answer": "1", "options": empty} for empty in (None, "", [], {})]
    records = load_records(lines(tmp_path / "a.jsonl", *rows))
    assert [(record.problem, record.form) for record in records] == [("1?", "math")] * 4


def test_messages_that_show_their_options_stay(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "Which? (A) 3 (B) 4"}],
        "options": ["3", "4"],
        "reward_model": {"ground_truth": "B"},
    }
    (record,) = load_records(lines(tmp_path / "a.jsonl", row))
    assert (record.problem, record.answer) == ("Which? (A) 3 (B) 4", "B")


def test_pairs_have_the_same_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    references: list[Any] = [
        ["Rob", "Bob"],
        '["Bob"]',
        {"value": "Bert", "aliases": ["Bob"]},
        {"aliases": []},
    ]
    pairs = [{"prediction": "\\boxed{Bob}", "reference": one} for one in references]
    path = lines(tmp_path / "p.jsonl", *pairs)
    assert main(["judge", "--pairs", str(path), "--verifier", "exact", "--json"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["correct"] for line in said] == [True] * 3 + [False]
    lines(path, {"prediction": "\\boxed{5}", "reference": {"value": 5}})
    assert main(["judge", "--pairs", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["correct"]
    for odd in ({"target": 6, "numbers": [1]}, [["a"]]):
        lines(path, {"prediction": "\\boxed{5}", "reference": odd})
        for verifier in ("exact", "math"):
            assert main(["judge", "--pairs", str(path), "--verifier", verifier]) == 2
            assert "p.jsonl:1: " in capsys.readouterr().err
