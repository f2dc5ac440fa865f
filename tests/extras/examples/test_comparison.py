"""The table that ``make quickstart`` prints, and what an interrupted comparison continues."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import EXAMPLES, REPOSITORY


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import comparison

    yield comparison
    sys.modules.pop("comparison")


@pytest.fixture
def begun(comparison: Any, tmp_path: Path) -> Any:
    """A comparison whose first training is finished."""
    (tmp_path / "policy").mkdir()
    for name in ("grpo.yaml", "dcpo.yaml", "train.jsonl", "heldout.jsonl", "policy/config.json"):
        (tmp_path / name).write_text("{}")
    one = comparison.Comparison(
        folder=tmp_path,
        out=tmp_path / "out",
        policy=tmp_path / "policy",
        methods=("grpo",),
        seed=1,
        heldout=tmp_path / "heldout.jsonl",
        train=tmp_path / "train.jsonl",
        fitted=5,
        sampling=("--top-k", "0"),
    )
    comparison.start_over_unless_interrupted(one)
    (one.out / "grpo" / "policy").mkdir(parents=True)
    return one


def test_an_interrupted_comparison_continues_with_more_methods(comparison: Any, begun: Any) -> None:
    comparison.start_over_unless_interrupted(begun)
    comparison.start_over_unless_interrupted(replace(begun, methods=("grpo", "dcpo")))
    assert (begun.out / "grpo" / "policy").is_dir()


@pytest.mark.parametrize(
    "changed", ["grpo.yaml", "train.jsonl", "heldout.jsonl", "policy/config.json"]
)
def test_a_changed_file_is_refused_by_name(comparison: Any, begun: Any, changed: str) -> None:
    (begun.folder / changed).write_text("{ }")
    with pytest.raises(SystemExit, match=changed.partition("/")[0].removesuffix(".jsonl")):
        comparison.start_over_unless_interrupted(begun)
    assert (begun.out / "grpo" / "policy").is_dir()


def test_changed_options_are_refused_and_another_seed_starts_over(
    comparison: Any, begun: Any
) -> None:
    more = replace(begun, overrides=("training.steps=3",))
    with pytest.raises(SystemExit, match=r"training\.steps=3"):
        comparison.start_over_unless_interrupted(more)
    comparison.start_over_unless_interrupted(replace(more, seed=2))
    assert not (begun.out / "grpo").exists()
    comparison.start_over_unless_interrupted(replace(more, seed=2))


def test_every_number_is_whole_in_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("COLUMNS", "80")
    import comparison

    rows = json.loads((REPOSITORY / "docs" / "quickstart.json").read_text())["seed_1"]
    comparison.show(rows, "seed 1")
    sys.modules.pop("comparison")
    shown = capsys.readouterr().out
    assert "…" not in shown
    for name, row in rows.items():
        (line,) = (line for line in shown.splitlines() if line.split()[:1] == [name])
        assert f"{row['brier']:.3f}" in line.split()
        assert f"{row['auroc_within']:.3f}" in line.split()


def test_means_of_several_seeds(
    comparison: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "seed_1", tmp_path / "seed_2"]
    record = json.loads((REPOSITORY / "docs" / "quickstart.json").read_text())
    for folder in folders:
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(record[folder.name]))
    comparison.means(folders, tmp_path / "means.json")
    mean = json.loads((tmp_path / "means.json").read_text())["mean"]
    ends = [record[folder.name]["grpo"]["brier"] for folder in folders]
    assert mean["grpo"]["brier"] == pytest.approx(sum(ends) / 2)
    assert f"{mean['grpo']['brier']:.3f}" in capsys.readouterr().out


def test_without_answers_to_fit_on_nothing_is_recalibrated(begun: Any) -> None:
    assert "grpo_recalibrated" in begun.rows
    assert replace(begun, fitted=0).rows == ("base", "grpo")
