"""The functions of examples/rows, each on a row as its set has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.data.code_problems import unpack_tests
from megatron_dcpo.data.datasets import Record, load_records
from megatron_dcpo.data.demonstration_rows import DemonstrationReader
from megatron_dcpo.data.row_reader import RowOptions
from tests.helpers.data import write
from tests.helpers.paths import EXAMPLES

ROWS = EXAMPLES / "rows"
OPTIONS = ["21", "21.5", "22", "22.5"]
CHOICES = {"text": OPTIONS, "label": ["1", "2", "3", "4"]}
CASE = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}


def records(tmp_path: Path, name: str, *rows: dict[str, Any]) -> list[Record]:
    reading = RowOptions(row=f"{ROWS / name}.py:row")
    return load_records(write(tmp_path / "rows.jsonl", list(rows)), reading=reading)


WITH_OPTIONS: dict[str, dict[str, Any]] = {
    "arc": {"question": "Which?", "choices": CHOICES, "answerKey": "2"},
    "medmcqa": {
        "question": "Which?",
        **dict(zip(("opa", "opb", "opc", "opd"), OPTIONS, strict=True)),
        "cop": 1,
    },
    "mmlu_table": {
        "question": "Which?",
        **dict(zip("ABCD", OPTIONS, strict=True)),
        "answer": "B",
    },
    "aqua": {
        "question": "Which?",
        "options": [f"{letter}){text}" for letter, text in zip("ABCD", OPTIONS, strict=True)],
        "correct": "B",
    },
    "math_qa": {
        "Problem": "Which?",
        "options": "a ) 21 , b ) 21.5 , c ) 22 , d ) 22.5",
        "correct": "b",
    },
}


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_questions_with_options(tmp_path: Path, name: str) -> None:
    (record,) = records(tmp_path, name, WITH_OPTIONS[name])
    assert record.problem == "Which?\n\nA. 21\nB. 21.5\nC. 22\nD. 22.5"
    assert (record.answer, record.form) == ("B", "choice")


def test_questions_about_a_passage(tmp_path: Path) -> None:
    squad = {"context": "Ann did.", "question": "Who?", "answers": {"text": ["Ann", "Ann did"]}}
    unanswered = {**squad, "answers": {"text": []}}
    (record,) = records(tmp_path, "squad", squad, unanswered)
    assert record.problem == "Ann did.\n\nWho?"
    assert (record.form, record.row) == ("short", {"answer": ["Ann", "Ann did"]})
    boolq = {"passage": "Ann did.", "question": "did ann", "answer": True}
    (record,) = records(tmp_path, "boolq", boolq)
    assert (record.answer, record.form) == ("yes", "short")


def test_programs(tmp_path: Path) -> None:
    cases = [{"input": "1 2\n", "output": "3\n"}]
    rows: list[dict[str, Any]] = []
    for language in ("python", "cpp", "Python3"):
        info = {"language": language, "test_cases": cases}
        rows.append({"prompt": "Add.", "verification_info": json.dumps(info)})
    rows.append({"prompt": "Add.", "verification_info": repr({"test_cases": cases})})
    rows.append({"prompt": "2+3?", "verification_info": '{"ground_truth": "5"}'})
    found = records(tmp_path, "prime_intellect", *rows)
    assert [record.index for record in found] == [0, 2, 3, 4]
    for record in found[:3]:
        assert record.tests is not None
        assert unpack_tests(record.tests) == {"kind": "stdin", "cases": cases}
    assert found[3].answer == "5"
    starter = "class Solution:\n    def total(self, nums): "
    (record,) = records(
        tmp_path,
        "deepcoder",
        {
            "problem": "Return the sum.",
            "tests": json.dumps([CASE]),
            "starter_code": starter,
            "metadata": {"func_name": "total"},
        },
    )
    assert record.tests is not None
    assert unpack_tests(record.tests)["entry_point"] == "Solution().total"
    assert starter.strip() in record.problem


def test_rows_with_images_are_left_out(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "answer": "2", "images": []}
    assert len(records(tmp_path, "with_images", row, {**row, "images": ["x.png"]})) == 1


def test_demonstrations_with_history() -> None:
    reader = DemonstrationReader("d", RowOptions(row=f"{ROWS / 'llama_factory.py'}:row"))
    row = {"instruction": "Add.", "input": "1", "output": "2", "history": [["1?", "1"]]}
    read = reader.read({**row, "system": "S"}, 1)
    assert read is not None
    assert [message["content"] for message in read.messages] == ["S", "1?", "1", "Add.\n1"]
    assert read.response == "2"


def test_every_function_is_in_the_table_and_here() -> None:
    table = (ROWS / "README.md").read_text()
    tested = Path(__file__).read_text()
    for file in ROWS.glob("*.py"):
        assert f"`{file.name}:row`" in table
        assert f'"{file.stem}' in tested or f"'{file.name}'" in tested
