"""The second world's cells and rows: its own problems and recipe, published tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.testgrid import Cell, Lab
from lab.world2 import DRAWS, GRAPHS, RECORDS, tables, world
from tests.helpers.paths import REPOSITORY

PUBLISHED = REPOSITORY / "docs" / "lab"


def test_cells_use_the_second_worlds_problems_and_recipe(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Lab, "policy", lambda self, cell: Path(cell.policy))
    grid = world(tmp_path, 1)
    train = grid.train_command(Cell("graphs.1", "dcpo", 1))
    assert train[:3] == ["train", "--config", str(GRAPHS / "recipe.yaml")]
    assert {
        f"data.path={GRAPHS / 'train.jsonl'}",
        "model.path=graphs.1",
        "training.steps=300",
    } <= set(train)
    sample = grid.sample_command(Cell("graphs.1", "base", 1), tmp_path, DRAWS["test"])
    assert f"test={GRAPHS / 'test.jsonl'}" in sample
    assert sample[sample.index("--max-tokens") + 1] == "40"


@pytest.mark.slow
def test_the_published_tables_are_those_of_the_published_records(tmp_path) -> None:
    tables(PUBLISHED / RECORDS, tmp_path)
    for name in ("world2.json", "world2_tables.md"):
        assert (tmp_path / name).read_text() == (PUBLISHED / name).read_text()
