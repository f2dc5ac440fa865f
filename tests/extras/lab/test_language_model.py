"""The study of a language model: its records become tables."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from lab.confidences import ACCURACY_GAINED, ADAPTERS, SAID_MINUS_LOOKUP, tables
from lab.language_model import STUDY, TAUGHT
from lab.results import write_archive

ARMS = (
    *("stated", "constant", "lookup", "boosted trees", "bar", "probe", "stack", *ADAPTERS),
    f"{TAUGHT}, greedy",
)


def records(seed: int, answers: int) -> bytes:
    """Return records in which the taught adapter is right, and every other arm says .5."""
    draw = np.random.default_rng(seed)
    correct = draw.integers(0, 2, answers).astype(float)
    arms = {arm: [0.5] * answers for arm in ARMS}
    arms[TAUGHT] = (0.1 + 0.8 * correct).tolist()
    row = {
        "problem": [f"test/{number}" for number in range(answers)],
        "kind": [f"chain_sum {number % 2}" for number in range(answers)],
        "correct": correct.tolist(),
        "arms": arms,
    }
    return json.dumps(row).encode()


def test_every_test_has_its_table_and_the_first_one_is_compared(tmp_path: Path) -> None:
    archive = tmp_path / STUDY.records
    files = {f"seed{seed}.json": records(seed, answers=40) for seed in (1, 2)}
    files |= {f"other.seed{seed}.json": records(seed, answers=20) for seed in (1, 2)}
    for seed in (1, 2):
        said = json.loads(records(seed, answers=40))
        said["problem"] = [f"{STUDY.said}/{number}" for number in range(40)]
        said["arms"]["stated"] = said["correct"]
        said["correct"] = [1.0] * 40
        said["arms"]["lookup"] = [0.5] * 40
        files[f"{STUDY.said}.seed{seed}.json"] = json.dumps(said).encode()
    write_archive(archive, files)
    found = tables(archive, tmp_path, STUDY)
    assert found["seeds"] == ["1", "2"]
    assert found["arms"][TAUGHT]["brier"] == pytest.approx([0.01, 0.01])
    mean, low, high = found["minus"]["lookup"][TAUGHT]["pooled"]
    assert mean == pytest.approx(-0.24)
    assert low <= mean <= high < 0
    assert found["others"]["other"]["bar"]["brier"] == pytest.approx([0.25, 0.25])
    assert set(found["others"]) == {"other", STUDY.said}
    assert set(found["accuracy"]) == {name.removesuffix(".json") for name in files}
    right = np.mean([found["accuracy"][f"seed{seed}"] for seed in (1, 2)])
    gained = found["said"][ACCURACY_GAINED]["pooled"]
    assert gained[0] == pytest.approx(1 - right)
    below = found["said"][SAID_MINUS_LOOKUP]["pooled"]
    assert below[0] == pytest.approx((1 - right) - 0.25), "stated 0 where the policy was wrong"
    page = (tmp_path / f"{STUDY.name}_tables.md").read_text()
    assert "python -m lab language-model" in page
    assert "`other`" in page
