"""The pictures of the documentation are small and shown; what the live page's is made of ends in
the middle of a run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from megatron_dcpo.evaluation.live import state
from tests.helpers.paths import REPOSITORY
from tools import pictures


@pytest.mark.parametrize(("name", "page"), [("report", "evaluation"), ("live", "getting_started")])
def test_pictures_are_small_and_shown(name: str, page: str) -> None:
    file = REPOSITORY / "docs" / f"{name}.png"
    assert file.stat().st_size <= pictures.MOST_BYTES
    with Image.open(file) as picture:
        assert picture.width == 1280
    assert f"]({name}.png)" in (REPOSITORY / "docs" / f"{page}.md").read_text()


def test_a_finished_run_is_shown_as_in_its_middle(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    (run / "samples").mkdir(parents=True)
    (run / "config.yaml").write_text("training: {steps: 8}\n")
    rows = [{"step": step, "reward/accuracy": 0.5, "time/step": 2.0} for step in range(1, 9)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (2, 4, 6):
        (run / "samples" / f"step_{step:06d}.jsonl").write_text("")
    assert pictures.until_the_middle(run, copy) == 4
    assert sorted(file.name for file in (copy / "samples").iterdir()) == [
        "step_000002.jsonl",
        "step_000004.jsonl",
    ]
    shown = state(copy)
    assert (shown["step"], shown["steps"], shown["seconds_left"]) == (4, 8, 8.0)
