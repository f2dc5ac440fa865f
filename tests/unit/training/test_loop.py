"""What a run says before its first step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_dcpo.config import load_config
from megatron_dcpo.training.loop import what_follows
from tests.helpers.paths import QUICKSTART


@pytest.mark.parametrize(
    ("steps", "done", "named"),
    [
        (250, 0, ["step 1 ", "384 responses"]),
        (250, 249, ["step 250 "]),
        (250, 250, ["runs/dcpo", "already done", "250", "training.steps=500"]),
        (2, 4, ["already done", "4 steps", "training.steps=2", "training.steps=8"]),
    ],
)
def test_a_finished_run_says_so(steps: int, done: int, named: list[str]) -> None:
    config = load_config(QUICKSTART / "dcpo.yaml")
    training = replace(config.training, steps=steps)
    said = what_follows(replace(config, training=training), done)
    assert all(word in said for word in named)
