"""The benchmark registry: spellings, counts, known defects, ad-hoc benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_dcpo.data.benchmarks import BENCHMARKS, find_benchmark, load_benchmark, parse_specs
from megatron_dcpo.errors import UserError
from tests.helpers.data import real
from tests.helpers.paths import DATA


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("MATH-500", "math500"),
        ("math_500", "math500"),
        ("AIME24", "aime24"),
        ("aime-2024", "aime24"),
        ("AIME 2025", "aime25"),
        ("AMC2023", "amc23"),
        ("amc24", "amc24"),
        ("GSM8K", "gsm8k"),
    ],
)
def test_spellings(spelling: str, name: str) -> None:
    assert find_benchmark(spelling).name == name


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="unknown benchmark 'aime99'; known: math500, aime24"):
        load_benchmark("aime99")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("math500", 500),
        ("aime24", 30),
        ("aime25", 30),
        ("amc23", 40),
        ("amc24", 44),
        ("gsm8k", 1319),
    ],
)
def test_real_benchmarks(name: str, found: int) -> None:
    if not DATA.is_dir():
        pytest.skip("no data directory; set DCPO_DATA")
    loaded = load_benchmark(name, DATA)
    assert len(loaded.records) == found
    assert {record.task for record in loaded.records} == {name}
    official = BENCHMARKS[name].count
    counted = [w for w in loaded.warnings if f"problems instead of {official} " in w]
    assert bool(counted) == (found != official)


def test_amc24_defects_are_warned_about() -> None:
    real("amc24/amc24.json")
    warnings = load_benchmark("amc24", DATA).warnings
    assert any("wrong keys in 12B-14" in warning for warning in warnings)


def test_ad_hoc_benchmark_and_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"problem": f"p{i}", "answer": str(i)}) for i in range(3)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    loaded = load_benchmark(f"held-out={tmp_path / 'mine.jsonl'}")
    assert (loaded.name, len(loaded.records), loaded.warnings) == ("held-out", 3, ())
    assert loaded.records[0].prompt_id == "held-out/0"
    (tmp_path / "math500.jsonl").write_text("\n".join(rows))
    monkeypatch.setenv("DCPO_DATA", str(tmp_path))
    (warning,) = load_benchmark("MATH-500").warnings
    for named in ("math500", "3 problems", "500", str(tmp_path / "math500.jsonl")):
        assert named in warning


def test_missing_data_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(
        UserError, match=rf"math500: no file below {tmp_path} \(set DCPO_DATA\), and HuggingFaceH4"
    ):
        load_benchmark("math500", tmp_path)
    with pytest.raises(UserError, match="data directory /none does not exist"):
        load_benchmark("math500", "/none")


def test_specs() -> None:
    assert parse_specs("math500, AIME24,mine=a.jsonl") == ["math500", "AIME24", "mine=a.jsonl"]
    with pytest.raises(UserError, match="named twice: aime24"):
        parse_specs("AIME24,aime2024")
    with pytest.raises(UserError, match="no benchmark named"):
        parse_specs(" , ")
    with pytest.raises(UserError, match="write NAME=PATH"):
        load_benchmark("a/b=x.jsonl")


def test_a_data_file_is_offered_with_a_name() -> None:
    with pytest.raises(UserError, match=r"my_train=runs/my_train\.jsonl"):
        find_benchmark("runs/my_train.jsonl")
