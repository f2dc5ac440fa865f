"""An agent of two turns and a tool (``examples/second_look``) trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import REPOSITORY
from tests.helpers.quickstart import SIZES, metrics, run

CONFIG = REPOSITORY / "examples" / "second_look" / "dcpo.yaml"


def train(run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    done = run(
        "train",
        "--config",
        CONFIG,
        f"run_dir={run_dir}",
        *SIZES,
        "logging.samples_interval=1",
        "training.save_interval=1",
        *overrides,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("second_look") / "run"
    train(run_dir, "training.steps=3")
    return run_dir


def test_the_tools_tokens_are_in_no_block(whole: Path) -> None:
    """Engine and trainer agree on all tokens that count: nobody gave log-probs of the others."""
    for row in metrics(whole):
        assert abs(row["engine/kl"]) < 1e-9
        assert row["engine/logprob_diff_max"] < 1e-4
        assert row["grad_norm/total"] > 0
    file = whole / "samples" / "step_000001.jsonl"
    blocks = [
        {block for _, block, _ in json.loads(line)["pieces"]}
        for line in file.read_text().splitlines()
    ]
    assert all({"reasoning", "other"} <= of_response for of_response in blocks)


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.max_staleness=1", "rollout.oversample=1.5", "objective.tis_level=token"),
    ],
)
def test_options_that_do_not_go_with_it_are_refused(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    done = run("train", "--config", CONFIG, f"run_dir={tmp_path / 'run'}", *overrides)
    assert done.returncode == 2
    assert "rollout.agent" in done.stderr
