"""A comparison that is run again where an earlier one was."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import EXAMPLES


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("comparison")


def of_seed(comparison: Any, out: Path, seed: int) -> Any:
    return comparison.Comparison(
        folder=out,
        out=out,
        policy=out,
        methods=("grpo", "dcpo"),
        seed=seed,
        heldout=out,
        train=out,
        fitted=1,
        sampling=(),
    )


@pytest.mark.parametrize(
    ("seed", "finished", "kept"), [(1, False, True), (1, True, False), (2, False, False)]
)
def test_what_an_earlier_one_left_is_kept_only_if_it_was_interrupted(
    comparison: Any, tmp_path: Path, seed: int, finished: bool, kept: bool
) -> None:
    """The responses that a confidence is fitted on as well: they are of the policy of then, and
    would be refused beside another.
    """
    comparison.start_over_unless_interrupted(of_seed(comparison, tmp_path, 1))
    left = [tmp_path / name for name in ("base", "grpo", "grpo_recalibrated", "fitted")]
    for directory in left:
        directory.mkdir()
    if finished:
        (tmp_path / "summary.json").write_text("{}")
    comparison.start_over_unless_interrupted(of_seed(comparison, tmp_path, seed))
    assert [directory.is_dir() for directory in left] == [kept] * len(left)
