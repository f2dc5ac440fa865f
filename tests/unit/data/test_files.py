"""Data sets in several files, in folders of the datasets library, and under other columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from pyarrow import ipc

from megatron_dcpo.cli import main
from megatron_dcpo.config import JudgingConfig, load_config
from megatron_dcpo.config.evaluation import load_evaluation
from megatron_dcpo.config.supervised_sections import validate_supervised
from megatron_dcpo.data.datasets import load_records, task_name
from megatron_dcpo.data.mixture import LoadedSource
from megatron_dcpo.data.row_files import is_here, read_rows
from megatron_dcpo.data.row_reader import RowOptions
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.problems import load_problems
from megatron_dcpo.training.provenance import row_functions
from megatron_dcpo.training.sources import contradictions, load_sources, trained_problems
from megatron_dcpo.training.supervised import with_steps
from megatron_dcpo.types import Prompt
from tests.helpers.paths import QUICKSTART
from tests.helpers.tokenizers import ByteTokenizer


def row(number: int) -> dict[str, Any]:
    return {"problem": f"{number}+0=", "answer": str(number)}


def write_parquet(path: Path, *numbers: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist([row(n) for n in numbers]), path)


def save_to_disk(directory: Path, *parts: list[int]) -> Path:
    """Write a folder as ``datasets.Dataset.save_to_disk`` does."""
    directory.mkdir(parents=True)
    names = []
    for number, rows in enumerate(parts):
        name = f"data-{number:05d}-of-{len(parts):05d}.arrow"
        table = pa.Table.from_pylist([row(n) for n in rows])
        with ipc.new_stream(str(directory / name), table.schema) as writer:
            writer.write_table(table)
        names.append({"filename": name})
    state = {"_data_files": names, "_fingerprint": "x", "_split": "train"}
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return directory


def problems(path: Path | str) -> list[str]:
    return [found["problem"] for found in read_rows(path)]


def test_parts_are_read_by_a_pattern_and_as_a_directory(tmp_path: Path) -> None:
    for part in range(3):
        name = f"train-{part:05d}-of-00003.parquet"
        write_parquet(tmp_path / "mine" / "data" / name, 2 * part, 2 * part + 1)
    folder = tmp_path / "mine" / "data"
    expected = [f"{n}+0=" for n in range(6)]
    assert problems(folder / "train-*.parquet") == expected
    assert problems(folder) == expected
    (tmp_path / "elsewhere").mkdir()
    assert is_here(str(folder / "tr*"))
    assert not is_here(str(folder / "te*"))
    records = load_records(folder / "train-*.parquet")
    assert [record.prompt_id for record in records] == [f"data/{n}" for n in range(6)]


def test_files_of_any_kind_are_read_by_a_pattern(tmp_path: Path) -> None:
    for name, number in (("b.jsonl", 2), ("a.jsonl", 1)):
        (tmp_path / name).write_text(json.dumps(row(number)) + "\n")
    (tmp_path / "c.csv").write_text("problem,answer\n3+0=,3\n")
    assert problems(tmp_path / "*") == ["1+0=", "2+0=", "3+0="]
    with pytest.raises(UserError, match="no such data file"):
        problems(tmp_path / "*.parquet")


def test_a_missing_part_is_refused(tmp_path: Path) -> None:
    for part in (0, 2):
        write_parquet(tmp_path / f"train-{part:05d}-of-00003.parquet", part)
    for path in (tmp_path, tmp_path / "train-*.parquet"):
        with pytest.raises(UserError, match="train-00001-of-00003"):
            problems(path)


def test_a_directory_of_several_data_sets_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-00000-of-00001.parquet", 1)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", 2)
    with pytest.raises(UserError, match=r"train-\*\.parquet"):
        problems(tmp_path)


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    assert problems(save_to_disk(tmp_path / "one", [1, 2], [3])) == ["1+0=", "2+0=", "3+0="]
    both = tmp_path / "both"
    for split in ("train", "test"):
        save_to_disk(both / split, [1 if split == "train" else 2])
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"train, test.*both/train"):
        problems(both)
    assert problems(both / "test") == ["2+0="]
    assert task_name(both / "test") == "both"
    (both / "dataset_dict.json").write_text('{"splits": ["test"]}')
    assert problems(both) == ["2+0="]


def test_arrow_files(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(1), row(2)])
    with ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert problems(tmp_path / "a.arrow") == ["1+0=", "2+0="]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", "{"),
        ("state.json", '{"_data_files": []}'),
        ("state.json", '{"_data_files": [{"filename": "none.arrow"}]}'),
        ("state.json", '{"_data_files": 3}'),
        ("data-00000-of-00001.arrow", "no Arrow"),
        ("data-00000-of-00001.arrow", ""),
        ("dataset_dict.json", '{"splits": 3}'),
    ],
)
def test_damaged_folders_are_one_line(file: str, content: str, tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "one", [1])
    (folder / file).write_text(content)
    with pytest.raises(UserError) as caught:
        problems(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("mine/train-*.parquet", "mine"),
        ("sums-*.jsonl", "sums"),
        ("x/sums-00000-of-00002.parquet", "sums"),
        ("mine/*.parquet", "mine"),
        ("mine/test[12].csv", "mine"),
    ],
)
def test_names_of_patterns(path: str, name: str) -> None:
    assert task_name(path) == name


# ------------------------------------------------------------------------------------------ columns

TRL = {"prompt": "1+2=", "solution": "3", "extra": {"deep": {"answer": "4"}}}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def config_of(tmp_path: Path, *overrides: str) -> Any:
    given = [f"run_dir={tmp_path / 'run'}", "data.template=raw", *overrides]
    return load_config(QUICKSTART / "dcpo.yaml", given)


def test_columns_of_a_training(tmp_path: Path) -> None:
    path = write(tmp_path / "trl.jsonl", TRL)
    config = config_of(
        tmp_path, f"data.path={path}", "data.columns={problem: prompt, answer: solution}"
    )
    (source,) = load_sources(config, ByteTokenizer())
    assert (source.prompts[0].problem, source.prompts[0].ground_truth) == ("1+2=", "3")
    deep = config_of(tmp_path, f"data.path={path}", "data.columns={answer: extra.deep.answer}")
    assert load_sources(deep, ByteTokenizer())[0].prompts[0].ground_truth == "4"


def test_a_named_answer_stands_for_that_of_verl(tmp_path: Path) -> None:
    verl = {"prompt": "1+2=", "reward_model": {"ground_truth": "9"}, "gold": "3"}
    (record,) = load_records(
        write(tmp_path / "v.jsonl", verl), reading=RowOptions({"answer": "gold"})
    )
    assert record.answer == "3"


def test_columns_of_sources(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", TRL)
    two = write(tmp_path / "two.jsonl", {"q": "2+2=", "a": "4"})
    sources = (
        f"data.path=[{{path: {one}}}, "
        f"{{path: {two}, columns: {{problem: q, answer: a}}}}, "
        "{path: 'reasoning_gym:chain_sum'}]"
    )
    config = config_of(tmp_path, sources, "data.columns={answer: solution}")
    assert [source.columns for source in config.data.sources] == [
        {"answer": "solution"},
        {"problem": "q", "answer": "a"},
        {},
    ]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ("{problem: qustion}", r"row 1.*'qustion'.*prompt, solution"),
        ("{answer: extra.shallow}", r"row 1.*'extra\.shallow'"),
        ("{probem: prompt}", r"data\.columns.*problem"),
        ("{problem: ''}", r"row 1.*problem"),
    ],
)
def test_a_column_that_is_not_there_is_refused(columns: str, named: str, tmp_path: Path) -> None:
    path = write(tmp_path / "trl.jsonl", TRL)
    with pytest.raises(UserError, match=named):
        load_sources(
            config_of(tmp_path, f"data.path={path}", f"data.columns={columns}"), ByteTokenizer()
        )


def test_columns_in_an_evaluation(tmp_path: Path) -> None:
    """A file that has them is read by them; one in our columns is read as it is."""
    trl = write(tmp_path / "trl.jsonl", TRL)
    ours = write(tmp_path / "ours.jsonl", row(7))
    reading = RowOptions({"problem": "prompt", "answer": "solution"})
    loaded = load_problems(f"a={trl},b={ours}", JudgingConfig(), reading=reading)
    answers = [one.benchmark.records[0].answer for one in loaded]
    assert answers == ["3", "7"]
    training = tmp_path / "config.yaml"
    training.write_text(
        f"run_dir: r\nmodel: {{path: m}}\ndata:\n  path: {trl}\n"
        "  columns: {problem: prompt, answer: solution}\n"
    )
    for given in ({"as_trained": str(training)}, {"file": str(training)}):
        config = load_evaluation({"run_dir": "e"}, **given)  # type: ignore[arg-type]
        assert config.data.columns == {"problem": "prompt", "answer": "solution"}


def test_a_pattern_is_searched_for_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in range(2):
        write_parquet(tmp_path / "c" / "data" / f"train-{part:05d}-of-00002.parquet", 1)
    text = (QUICKSTART / "dcpo.yaml").read_text()
    named = "path: examples/quickstart/data/train.jsonl"
    assert named in text
    text = text.replace(named, "path: data/train-*.parquet")
    (tmp_path / "c" / "own.yaml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    command = ["train", "--config", str(tmp_path / "c" / "own.yaml"), "--dry-run"]
    assert main([*command, f"model.path={QUICKSTART / 'policy'}"]) == 0
    assert "2 problems" in capsys.readouterr().out


@pytest.mark.parametrize(
    "pattern",
    [
        *("train-{n:05d}-of-00003-0a1b{n}c3d4e5f6071.jsonl", "train_{n}_of_3.jsonl"),
        *("p-{n}-of-3.jsonl", "q-{n:05d}-of-00003-9f-{n}c3d_4e5f.jsonl"),
    ],
)
def test_parts_of_any_names_are_all_there_or_refused(tmp_path: Path, pattern: str) -> None:
    for n in range(3):
        (tmp_path / pattern.format(n=n)).write_text(f'{{"n": {n}}}\n')
    assert [row["n"] for row in read_rows(tmp_path)] == [0, 1, 2]
    assert [row["n"] for row in read_rows(str(tmp_path / "*.jsonl"))] == [0, 1, 2]
    if "0a1b" in pattern:
        twice = tmp_path / "train-00001-of-00003-ffff0000ffff0000.jsonl"
        twice.write_text('{"n": 1}\n')
        with pytest.raises(UserError, match="ffff0000"):
            list(read_rows(tmp_path))
        twice.unlink()
    (tmp_path / pattern.format(n=1)).unlink()
    for path in (str(tmp_path), str(tmp_path / "*.jsonl")):
        with pytest.raises(UserError, match="1 of the 3 parts"):
            list(read_rows(path))


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_another_separator_of_columns_is_named(tmp_path: Path, separator: str) -> None:
    rows = (("problem", "answer"), ("1+1", "2"), ("1/2", "0,5"))
    (tmp_path / "t.csv").write_text("\n".join(map(separator.join, rows)))
    with pytest.raises(UserError, match=re.escape(repr(separator))):
        list(read_rows(tmp_path / "t.csv"))


def test_a_field_of_a_table_may_be_long(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "t.csv").write_text(f"problem,solution\n1+1,{long}\n")
    assert list(read_rows(tmp_path / "t.csv")) == [{"problem": "1+1", "solution": long}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("value", "count"),
    [({"problem": "1+1", "answer": "2"}, 1), ({"data": [{"problem": "1"}, {"problem": "2"}]}, 2)],
)
def test_a_json_file_of_one_object(
    tmp_path: Path, value: object, count: int, indent: int | None
) -> None:
    (tmp_path / "d.json").write_text(json.dumps(value, indent=indent))
    rows = list(read_rows(tmp_path / "d.json"))
    assert len(rows) == count
    assert all("problem" in row for row in rows)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(UserError, match=f"{path}.*LFS"):
        list(read_rows(path))


def test_prompts_with_different_answers_are_counted() -> None:
    def prompt(token: int, answer: str) -> Prompt:
        return Prompt(f"{token}/{answer}", (), (token,), answer, "mine")

    same = [prompt(1, "2"), prompt(1, "2"), prompt(2, "2")]
    assert contradictions([LoadedSource("a", "a.jsonl", same, 1.0, None)]) == ""
    other = [prompt(2, "3"), prompt(3, "3")]
    sources = [
        LoadedSource(name, name, found, 0.5, None)
        for name, found in zip("ab", (same, other), strict=True)
    ]
    assert contradictions(sources).endswith(" 1")


def test_held_out_problems_in_the_training_data_are_counted() -> None:
    def prompt(problem: str, task: str = "mine") -> Prompt:
        return Prompt(problem, (), (), "1", task, problem=problem)

    trained = [LoadedSource("a", "a.jsonl", [prompt("1+1?"), prompt("2+ 2?")], 1.0, None)]
    held_out = [prompt("1+1?"), prompt("2+\n2?"), prompt("3+3?"), prompt("4+4?", "other")]
    assert "2 of mine's 3" in trained_problems(trained, held_out)
    assert trained_problems(trained, held_out[2:]) == ""
    # verl's files ask for the box in the problem, benchmarks do not
    asked = "One and two. 3+3? Let's think and output the final answer within \\boxed{}."
    trained = [LoadedSource("a", "a.jsonl", [prompt(asked), prompt("\\boxed{}")], 1.0, None)]
    held_out = [prompt("One and two. 3+3?"), prompt("One and two."), prompt("5+5?")]
    assert "1 of mine's 3" in trained_problems(trained, held_out)


def test_steps_of_supervised_training_go_on_through_further_passes() -> None:
    values = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"path": "d.jsonl", "examples_per_step": 4},
    }
    config = validate_supervised({**values, "training": {"steps": 6}})
    assert with_steps(config, examples=8).training.steps == 6
    config = validate_supervised({**values, "training": {"epochs": 3}})
    assert with_steps(config, examples=9).training.steps == 7


ROWS = "def row(row):\n    return {'problem': row['q'], 'answer': row['a']} if row['a'] else None\n"


def test_a_function_for_the_rows_of_a_source(tmp_path: Path) -> None:
    (tmp_path / "my_rows.py").write_text(ROWS)
    function = f"{tmp_path / 'my_rows.py'}:row"
    odd = write(tmp_path / "odd.jsonl", {"q": "2+2=", "a": "4"}, {"q": "?", "a": ""})
    plain = write(tmp_path / "plain.jsonl", row(7))
    sources = f"data.path=[{{path: {odd}, row: '{function}'}}, {{path: {plain}}}]"
    one, other = load_sources(config_of(tmp_path, sources), ByteTokenizer())  # type: ignore[arg-type]
    assert [prompt.ground_truth for prompt in one.prompts] == ["4"]
    assert [prompt.ground_truth for prompt in other.prompts] == ["7"]
    config = config_of(tmp_path, f"data.path={odd}", f"data.row={function}")
    (source,) = load_sources(config, ByteTokenizer())  # type: ignore[arg-type]
    assert source.prompts[0].problem == "2+2="
    assert set(row_functions(config)) == {function}
    reading = RowOptions(row=function)
    (loaded,) = load_problems(f"a={odd}", JudgingConfig(), reading=reading)
    assert loaded.benchmark.records[0].answer == "4"
    with pytest.raises(UserError, match=r"data.*columns"):
        config_of(tmp_path, f"data.path={odd}", f"data.row={function}", "data.columns={answer: a}")
    unread = write(tmp_path / "unread.jsonl", {**row(7), "x": 1})
    refusing = config_of(tmp_path, f"data.path={unread}", "data.unread=refuse")
    with pytest.raises(UserError, match=r"data\.unread.*x \(100 %\)"):
        load_sources(refusing, ByteTokenizer())  # type: ignore[arg-type]
