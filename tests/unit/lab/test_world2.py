"""The second world's cells and rows: its own problems and recipe, a base that is not trained, published tables."""

from __future__ import annotations

import numpy as np
import pytest

from lab.grid import Cell
from lab.testtables import Records
from lab.world2 import DRAWS, GRAPHS, RECORDS, by_answer, tables, world
from tests.helpers.paths import REPOSITORY

PUBLISHED = REPOSITORY / "docs" / "lab"


def test_cells_use_the_second_worlds_problems_and_base_is_only_sampled(tmp_path) -> None:
    grid, ran = world(tmp_path, 1), []
    object.__setattr__(grid, "_call", lambda run, command: ran.append(command))
    object.__setattr__(grid, "fingerprint", lambda cell: "x")
    grid.run_cell(Cell("graphs.1", "base", 1))
    (sample,) = ran
    assert sample[0] == "evaluate"
    assert f"test={GRAPHS / 'test.jsonl'}" in sample
    assert sample[sample.index("--max-tokens") + 1] == "40"
    assert sample[sample.index("--model") + 1].endswith("examples/lab/graphs.1/policy")
    ran.clear()
    grid.run_cell(Cell("graphs.1", "adapter_tokens", 1))
    assert ran[0][:3] == ["train", "--config", str(GRAPHS / "recipe.yaml")]
    assert f"data.path={GRAPHS / 'train.jsonl'}" in ran[0]
    assert [c[-1] == "--no-adapter" for c in ran[1:]] == [False, True] * len(DRAWS)


def test_a_lookup_of_answers_is_fitted_on_validation_and_states_the_mean_for_a_new_answer() -> None:
    def records(answer: list[str], correct: list[int]) -> Records:
        n = np.zeros(len(answer))
        return Records(n.astype(int), np.array(["7"] * len(answer)), np.array(correct, float), n, n, np.array(answer))

    stated = by_answer(records(["21", "21", "30", "30"], [1, 0, 1, 1]))
    assert stated(records(["30", "21", "99"], [0, 0, 0])).tolist() == [1.0, 0.5, 0.75]


@pytest.mark.skipif(not (PUBLISHED / RECORDS).is_file(), reason="no records of the second world are published")
def test_the_published_tables_are_those_of_the_published_records(tmp_path) -> None:
    tables(PUBLISHED / RECORDS, tmp_path)
    for name in ("world2.json", "world2_tables.md"):
        assert (tmp_path / name).read_text() == (PUBLISHED / name).read_text()
