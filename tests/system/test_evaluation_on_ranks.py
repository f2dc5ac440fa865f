"""``dcpo launch N -- evaluate --model``: an engine per rank, and what one process finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import run

HELDOUT = QUICKSTART / "data" / "heldout.jsonl"


def evaluated(out: Path, processes: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Three problems under two names: the ranks have two and one of each."""
    done = run(
        *(
            "evaluate",
            "--model",
            QUICKSTART / "policy",
            "--benchmarks",
            f"a={HELDOUT},b={HELDOUT}",
            "--limit",
            "3",
        ),
        *(
            "--template",
            "raw",
            "--repeats",
            "2",
            "--max-tokens",
            "32",
            "--resamples",
            "0",
            "--engine",
            "transformers",
        ),
        *("--confidence", "verbal,token,consistency", "--out", out, "--json"),
        processes=processes,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(printed) == 1, "the first rank speaks for all"
    written = json.loads((out / "evaluation.json").read_text())
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()], written


def test_ranks_find_together_what_one_process_finds(tmp_path: Path) -> None:
    samples, evaluation = evaluated(tmp_path / "ranks", 2)
    expected, alone = evaluated(tmp_path / "alone", 1)
    assert len(samples) == 12
    for mine, theirs in zip(samples, expected, strict=True):
        floats = {name for name, value in theirs.items() if isinstance(value, float)}
        assert {k: v for k, v in mine.items() if k not in floats} == {
            k: v for k, v in theirs.items() if k not in floats
        }
        assert [mine[name] for name in sorted(floats)] == pytest.approx(
            [theirs[n] for n in sorted(floats)], rel=1e-4
        )
    for name in ("a", "b"):
        scores, others = evaluation["benchmarks"][name], alone["benchmarks"][name]
        assert (scores["accuracy"], scores["n"]) == (others["accuracy"], others["n"])
        assert scores["token"]["mean"] == pytest.approx(others["token"]["mean"], rel=1e-4)
        assert scores["consistency"]["mean"] == others["consistency"]["mean"]
