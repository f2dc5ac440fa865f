"""Loaders: every kind of file and row, broken ones included, and every real data file where it is
present.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
from pathlib import Path

import pytest

from megatron_dcpo.data import datasets, row_files
from megatron_dcpo.data.answer_keys import final_answer
from megatron_dcpo.data.datasets import (
    PromptOptions,
    draw_prompts,
    load_prompts,
    load_records,
)
from megatron_dcpo.data.labels import without_epoch
from megatron_dcpo.data.row_files import read_rows
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import Prompt
from tests.helpers.data import real, write
from tests.helpers.tokenizers import ByteTokenizer

# file below the data directory: (rows, problems with an answer or tests; None: refused)
REAL_FILES: dict[str, tuple[int, int | None]] = {
    "aime24/aime.json": (30, 30),
    "aime24/aime24.parquet": (30, 30),
    "aime25/aime2025.reconstructed.jsonl": (30, 30),
    "aime25/aime25.json": (30, 30),
    "aime25/test.jsonl": (30, 30),
    "amc23/amc_2022_2023.json": (83, 83),
    "amc23/test.jsonl": (40, 40),
    "amc24/amc24.json": (44, 44),
    "code_rllm/test_code_contests.json": (165, 165),
    "code_rllm/test_codeforces.json": (408, 408),
    "code_rllm/test_leetcode.json": (200, 200),
    "code_rllm/train_leetcode.json": (1889, 1889),
    **{
        f"deepscaler_full/DeepScaleR_Difficulty_Level_{i}_test.json": (100, 100)
        for i in range(1, 6)
    },
    "deepscaler_full/DeepScaleR_Difficulty_Level_1_train.json": (7961, 7961),
    "deepscaler_full/DeepScaleR_Difficulty_Level_2_train.json": (7962, 7962),
    "deepscaler_full/DeepScaleR_Difficulty_Level_3_train.json": (7961, 7961),
    "deepscaler_full/DeepScaleR_Difficulty_Level_4_train.json": (7962, 7962),
    "deepscaler_full/DeepScaleR_Difficulty_Level_5_train.json": (7962, 7962),
    "deepscaler_uniform/deepscaler_uniform_train.parquet": (10000, 10000),
    "deepscaler_uniform/deepscaler_uniform_train_with_confidence.parquet": (10000, 10000),
    "gsm8k/test.jsonl": (1319, 1319),
    "gsm8k/train.jsonl": (7473, 7473),
    "humaneval/HumanEval.jsonl.gz": (164, 164),
    "humanevalplus/HumanEvalPlus-Mini.jsonl.gz": (164, 164),
    "humanevalplus/HumanEvalPlus-OriginFmt.jsonl.gz": (164, 164),
    "humanevalplus/HumanEvalPlus.jsonl.gz": (164, 164),
    "leetcodedataset/LeetCodeDataset-v0.2.0-test.jsonl.gz": (200, 200),
    "leetcodedataset/LeetCodeDataset-v0.2.0-train.jsonl.gz": (1890, 1890),
    "leetcodedataset/LeetCodeDataset-v0.3.1-test.jsonl.gz": (228, 228),
    "math500/test.jsonl": (500, 500),
    "math_train/math.json": (7474, 7470),  # four answers are null
    "mbpp/mbpp.jsonl": (974, 974),
    "mbppplus/MbppPlus-OriginFmt.jsonl.gz": (378, 375),  # three assert nothing
    "mbppplus/MbppPlus.jsonl.gz": (378, None),  # refused: its JSON has lost which lists are tuples
}


@pytest.mark.parametrize("file", REAL_FILES)
def test_real_files_load_with_their_count(file: str) -> None:
    path, (rows, problems) = real(file), REAL_FILES[file]
    assert sum(1 for _ in read_rows(path)) == rows
    if problems is None:
        with pytest.raises(UserError, match=r"MbppPlus-OriginFmt"):
            load_records(path)
        return
    records = load_records(path)
    assert len(records) == problems
    assert len({record.prompt_id for record in records}) == problems
    assert all(record.answer and record.problem for record in records)


def test_real_answers_are_clean() -> None:
    assert all(
        r.answer.replace("-", "").replace(".", "").isdigit()
        for r in load_records(real("gsm8k/test.jsonl"))
    )
    for file in (
        "aime24/aime.json",
        "aime24/aime24.parquet",
        "aime25/test.jsonl",
        "aime25/aime25.json",
    ):
        assert all(
            str(int(record.answer)) == record.answer for record in load_records(real(file))
        ), file
    assert [r.answer for r in load_records(real("amc23/test.jsonl"))][:2] == ["27", "36"]


def test_both_reference_training_files_render_to_the_same_prompts() -> None:
    """Their confidence request (another marker, with typos) is replaced by ours."""
    names = ("deepscaler_uniform_train.parquet", "deepscaler_uniform_train_with_confidence.parquet")
    plain, asked = (load_records(real(f"deepscaler_uniform/{name}"))[:300] for name in names)
    tokenizer = ByteTokenizer()
    assert datasets.render_prompts(plain, tokenizer) == datasets.render_prompts(asked, tokenizer)


def test_verl_rows(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 1+1?"}]
    row = {
        "data_source": "toy",
        "prompt": chat,
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {},
    }
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(
        pa.Table.from_pylist([{k: v for k, v in row.items() if k != "extra_info"}] * 3),
        tmp_path / "a.parquet",
    )
    for path in (tmp_path / "a.parquet", write(tmp_path / "a.jsonl", [row] * 3)):
        prompts = load_prompts(path, ByteTokenizer())
        assert [p.prompt_id for p in prompts] == [
            "toy/0",
            "toy/1",
            "toy/2",
        ]  # equal problems keep their own groups
        assert {p.ground_truth for p in prompts} == {"2"}
        assert {p.task for p in prompts} == {"toy"}
        assert isinstance(prompts[0].token_ids, tuple)


@pytest.mark.parametrize("column", ["problem", "question", "prompt"])
@pytest.mark.parametrize("answer", ["answer", "ground_truth", "final_answer"])
def test_plain_columns(tmp_path: Path, column: str, answer: str) -> None:
    path = write(tmp_path / "toy.jsonl", [{column: "1+1?", answer: 2}])
    record = load_records(path)[0]
    assert (record.problem, record.answer, record.task) == ("1+1?", "2", "toy")


@pytest.mark.parametrize(
    "row",
    [
        {"problem": None, "question": "1+1?", "answer": None, "final_answer": "2"},
        {"question": "1+1?", "answer": "", "ground_truth": 2.0},
        {"problem": "1+1?", "answer": "2", "reward_model": {"ground_truth": None, "style": "rule"}},
        {"problem": "1+1?", "answer": "Two.", "reward_model": {"ground_truth": "2"}},
        {"problem": "1+1?", "answer": "1 and 1\n#### 2", "final_answer": 2, "ground_truth": [3]},
    ],
)
def test_a_column_that_says_something_is_read(tmp_path: Path, row: dict[str, object]) -> None:
    """Rows of several sets in one table have the columns of all of them."""
    (record,) = load_records(write(tmp_path / "toy.jsonl", [row]))
    assert (record.problem, record.answer) == ("1+1?", "2")


def test_two_answers_are_refused_until_one_is_named(tmp_path: Path) -> None:
    row = {"problem": "1+1?", "answer": "I think \\boxed{3}", "ground_truth": "2"}
    path = write(tmp_path / "toy.jsonl", [row])
    with pytest.raises(UserError, match=r"row 1: .*answer.*ground_truth.*data\.columns"):
        load_records(path)
    named = [
        load_records(path, reading=RowOptions({"answer": name}))[0].answer for name in list(row)[1:]
    ]
    assert named == ["3", "2"]
    (kept,) = load_records(path, keep_columns=True, reading=RowOptions({"answer": "answer"}))
    assert kept.row is not None
    assert kept.row["ground_truth"] == "2"


@pytest.mark.parametrize(
    ("raw", "integer", "expected"),
    [
        ("reasoning\n#### 1,234,567", False, "1234567"),
        ("so 3,\n#### 12", False, "12"),
        ("#### -5.50", False, "-5.50"),
        (
            "(1,234)",
            False,
            "(1,234)",
        ),  # a pair, not a thousands comma: only GSM8K finals are touched
        ("025", True, "25"),
        ("000", True, "0"),
        ("025", False, "025"),
        ("336^\\circ", True, "336"),
        ("336^\\circ", False, "336^\\circ"),
        (27.0, False, "27"),
        (0.5, False, "0.5"),
        (float("nan"), False, ""),
        (7, False, "7"),
        (None, False, ""),
        ("  \\frac{1}{2} ", False, "\\frac{1}{2}"),
        ("So \\boxed{1}, thus \\boxed{\\frac{1}{2}}.", False, "\\frac{1}{2}"),
        ("\\boxed{025}", False, "025"),
        ("so \\boxed{3} or \\boxed{4", False, "3"),
        ("\\boxed{}", False, "\\boxed{}"),
    ],
)
def test_final_answer(raw: object, integer: bool, expected: str) -> None:
    assert final_answer(raw, integer) == expected


def test_json_array_gzip_and_line_separators_inside_strings(tmp_path: Path) -> None:
    rows = [{"problem": "line\u2028separator", "answer": "1"}, {"problem": "b", "answer": "2"}]
    (tmp_path / "array.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text(
        "\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8"
    )
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n\n".join(json.dumps(r) for r in rows))
    for name in ("array.json", "lines.jsonl", "lines.jsonl.gz"):
        assert [r.answer for r in load_records(tmp_path / name)] == ["1", "2"], name


def test_long_prompts_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        tmp_path / "toy.jsonl", [{"problem": "x" * n, "answer": "1"} for n in (5, 500, 6, 700, 7)]
    )
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(path, ByteTokenizer(), PromptOptions("raw", max_prompt_length=100))
    assert [p.prompt_id for p in prompts] == ["toy/0", "toy/2", "toy/4"]
    (dropped,) = caplog.messages
    assert dropped.startswith(str(path))
    assert re.findall(r"\b\d+\b", dropped.removeprefix(str(path))) == ["2", "100"]
    assert len(load_prompts(path, ByteTokenizer(), PromptOptions("raw", 100, limit=2))) == 2
    assert len(load_prompts(path, ByteTokenizer(), PromptOptions("raw", limit=0))) == 5
    with pytest.raises(UserError, match=r"toy\.jsonl: .*\b3 tokens"):
        load_prompts(path, ByteTokenizer(), PromptOptions("raw", max_prompt_length=3))


@pytest.mark.parametrize("empty", [None, [], [None], ""])
def test_rows_without_an_answer_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, empty: object
) -> None:
    path = write(
        tmp_path / "t.jsonl", [{"problem": "a", "answer": empty}, {"problem": "b", "answer": "1"}]
    )
    with caplog.at_level(logging.WARNING):
        assert [r.prompt_id for r in load_records(path)] == ["t/1"]
    (dropped,) = caplog.messages
    assert dropped.startswith(str(path))
    assert "1 rows" in dropped


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
PACKED = gzip.compress(b'{"problem": "?"}', mtime=0)
# every defect of a file of data that is known: its name, its content, and what the message names
REFUSED: dict[str, tuple[str, str | bytes, list[str]]] = {
    "a line cut in half": (
        "a.jsonl",
        '{"problem": "a", "answer": "1"}\n{"problem": "b", \n',
        ["a.jsonl:2"],
    ),
    "a line that is a list": (
        "a.jsonl",
        '{"problem": "a", "answer": "1"}\n\n[1]\n',
        ["a.jsonl:3", "list"],
    ),
    "a line that is a number": ("a.jsonl", '{"problem": "a", "answer": "1"}\n7\n', ["a.jsonl:2"]),
    "no column of problems": (
        "a.jsonl",
        '{"text": "a", "answer": "1"}\n',
        ["row 1", "text, answer", "problem, question, prompt"],
    ),
    "no column of answers": ("a.jsonl", '{"problem": "a"}\n', ["row 1", "answer, ground_truth"]),
    "a solution alone": (
        "a.jsonl",
        '{"problem": "a", "solution": "1"}\n',
        ["row 1", "problem, solution", "answer, ground_truth"],
    ),
    "a number as problem": ("a.jsonl", '{"problem": 5, "answer": "1"}\n', ["row 1", "problem"]),
    "answers that are all empty": (
        "a.jsonl",
        '{"problem": "a", "answer": null}\n',
        ["a.jsonl", "answer"],
    ),
    "a git-lfs pointer": ("a.jsonl", LFS, ["a.jsonl", "git lfs pull"]),
    "an empty file": ("a.jsonl", "", ["a.jsonl", "answer"]),
    "an array that is cut": ("a.jsonl", '[{"problem": "a"},\n 3', ["a.jsonl:2"]),
    "an array of numbers": ("a.jsonl", "[1]", ["a.jsonl", "element 1", "int"]),
    "another kind of file": ("a.tsv", "x", ["a.tsv", ".jsonl", ".parquet"]),
    "parquet that is none": ("a.parquet", "PAR1", ["a.parquet"]),
    "two columns of one name": ("a.csv", "problem,answer,answer\na,1,2\n", ["a.csv", "answer"]),
    "UTF-16": ("a.jsonl", b"\xff\xfe\x00", ["a.jsonl", "UTF-8"]),
    "Latin-1": ("a.jsonl", "é".encode("latin-1"), ["a.jsonl", "UTF-8"]),
    "gzip that is cut": ("a.jsonl", b"\x1f\x8b\x08\x00", ["a.jsonl", "UTF-8"]),
    "gzip with a damaged end": ("a.json", PACKED[:-9] + b"\xff" * 9, ["a.json", "UTF-8"]),
    "gzip with a damaged middle": ("a.json", PACKED[:12] + b"\xff" * 9, ["a.json", "UTF-8"]),
    "a deep array": ("a.json", b"[" * 10**5, ["a.json"]),
    "a deep value": ("a.json", b'{"problem": ' + b"[" * 10**5, ["a.json:1"]),
    "a number of many digits": (
        "a.json",
        b'[{"problem": "?", "answer": ' + b"9" * 5000 + b"}]",
        ["a.json"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_file_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, content, named = REFUSED[case]
    raw = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError) as refused:
        load_records(tmp_path / name)
    said = str(refused.value)
    assert [word for word in named if word not in said] == [], said
    assert "\n" not in said


def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    for directory, files_in_it in (("empty", ()), ("two", ("a.jsonl", "b.parquet"))):
        (tmp_path / directory).mkdir()
        for name in files_in_it:
            (tmp_path / directory / name).write_text("{}\n")
    for path, named in (
        (tmp_path / "none.jsonl", "none.jsonl"),
        ("./none/here", "./none/here"),
        (tmp_path / "empty", "empty"),
        (tmp_path / "two", "a.jsonl, b.parquet"),
    ):
        with pytest.raises(UserError, match=re.escape(named)) as refused:
            load_records(path)
        assert "\n" not in str(refused.value)


def test_a_directory_with_one_file(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "test.jsonl", [{"problem": "a", "answer": "1"}])
    assert load_records(tmp_path / "mine")[0].task == "mine"
    assert load_records(tmp_path / "mine" / "test.jsonl")[0].task == "mine"


def test_hub_names_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"owner/name@test\b.*datasets"):
        load_records("owner/name@test")


def test_hub_names_with_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    seen = []

    def load_dataset(repository: str, config: str | None, split: str) -> list[dict[str, str]]:
        seen.append((repository, config, split))
        if repository == "owner/gone":
            raise ConnectionError("offline\nand more")
        return [{"question": "q", "answer": "#### 1,000"}]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert load_records("owner/name:main@test")[0].answer == "1000"
    assert load_records("owner/name")[0].task == "name"
    assert seen == [("owner/name", "main", "test"), ("owner/name", None, "train")]
    with pytest.raises(UserError, match=r"owner/gone\b.*offline"):
        load_records("owner/gone")


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json.gz"])
def test_a_small_file_cannot_fill_the_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_files, "LONGEST", 10_000)
    path = tmp_path / name
    row = json.dumps({"problem": "x" * 20_000, "answer": "1"})
    path.write_bytes(gzip.compress((f"[{row}]" if "json." in name else row + "\n").encode()))
    with pytest.raises(UserError, match=re.escape(name)):
        load_records(path)


def test_an_answer_key_of_many_digits_is_text(tmp_path: Path) -> None:
    assert final_answer("7" * 5000, integer=True) == "7" * 5000
    assert final_answer("0" * 30 + "7", integer=True) == "7"
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "a\\ud800", "answer": "\\udfff"}\n')
    (record,) = load_records(path)
    assert (record.problem, record.answer) == ("a\ufffd", "\ufffd")


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"task": "sums"}, "sums"),
        ({"task": "sums", "type": "2x2"}, "2x2"),
        ({"level": 3, "task": "sums"}, "3"),
        ({"task": ["sums"]}, None),
        ({"task": True}, None),
        ({}, None),
    ],
)
def test_the_kind_of_a_problem_is_the_first_column_that_names_one(
    columns: dict[str, object], kind: str | None, tmp_path: Path
) -> None:
    row = {"problem": "1+1?", "answer": "2", **columns}
    (record,) = load_records(write(tmp_path / "a.jsonl", [row]))
    assert record.kind == kind


def test_keys_that_equal_no_answer_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["proof", "notfound", "nan", "None", "N/A", "\\boxed{}", "\\boxed{\\text{Proof}}", "42"]
    keys += [
        "?",
        "(none)",
        "**None**",
        '"N/A"',
        "$$\\text{none}$$",
        "NA",
        "TBD",
        "No answer.",
        "\u2026",
    ]
    rows = [{"problem": f"{n}?", "answer": key} for n, key in enumerate(keys)]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        records = load_records(path)
    assert [record.answer for record in records] == ["42"]
    for name in ("'proof'", "'notfound'", "'N/A'", "boxed"):
        assert any(name in message and "1 rows" in message for message in caplog.messages), name


@pytest.mark.parametrize(
    "key",
    ["unknown", "undefined", "not given", "Na", "-", "[]", "()", '""', "no solution", "(1, 2)"],
)
def test_keys_that_are_answers_of_some_problems_stay(tmp_path: Path, key: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"problem": "1+1", "answer": key}) + "\n")
    assert [record.answer for record in load_records(path)] == [key]


def test_a_row_without_tests_says_so(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"question": "add", "test": "def test_add(): ...", "id": 1}) + "\n")
    with pytest.raises(UserError, match=r"row 1.*answer.*tests.*data\.columns"):
        load_records(path)


def test_an_image_of_nulls_is_none(tmp_path: Path) -> None:
    row = {"problem": "1+1", "answer": "2", "image": {"bytes": None, "path": None}}
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert len(load_records(path)) == 1


def test_the_epoch_of_a_drawn_prompt_comes_off_again() -> None:
    own = ["toy/0", "toy/1@3", "user@example"]
    prompts = [Prompt(name, (), (), "", "toy") for name in own]
    drawn = [one.prompt_id for one in draw_prompts(prompts, 0, 33, seed=0, shuffle=False)]
    assert len(set(drawn)) == 33
    assert [without_epoch(name) for name in drawn] == own * 11
