"""Whatever a run carries from a step into the next is in its checkpoint: killed behind a step, it
ends as one that nobody killed, in every metric, sample, weight and moment.

Kills as they happen: test_checkpoints.py and test_kills.py; signals: test_signals.py; other
layouts: test_checkpoints.py and tests/distributed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SIZES, SMALL, run
from tests.helpers.resumed import assert_same_end, cut_behind
from tests.system import test_agents, test_mixture, test_supervised

STEPS = ("training.steps=2", "training.save_interval=1", "training.resume=auto")


def repeats(name: str) -> bool:
    """The log-probs of an engine that agents ask are rounded as calls happen to run together;
    nothing of the method reads them.
    """
    return not name.startswith(("engine/", "rollout/utilization"))


@dataclass(frozen=True)
class Feature:
    """``words`` are of a command, whose files they write into a folder."""

    words: Callable[[Path], list[str]]
    repeats: Callable[[str], bool] = lambda name: True


def quickstart(*overrides: str) -> list[str]:
    config = str(QUICKSTART / "dcpo.yaml")
    return ["train", "--config", config, *SMALL, "logging.samples_interval=1", *overrides]


def partial_rollouts(folder: Path) -> list[str]:
    return quickstart(
        "rollout.max_staleness=1", "rollout.oversample=1.5", "objective.tis_level=token"
    )


def sources_of_which_groups_are_filtered(folder: Path) -> list[str]:
    """The next step goes on behind the last prompt consumed of each source."""
    config = test_mixture.write_config(folder)
    return ["train", "--config", str(config), *SIZES, "rollout.filter_groups=true"]


def agents_with_a_confidence_at_every_turn(folder: Path) -> list[str]:
    test_agents.write_files(folder)
    turns = ("rollout.asks_confidence=turns", "objective.entropy_coef_confidence=0.3")
    return ["train", "--config", str(test_agents.write_config(folder)), *turns]


def adapter(folder: Path) -> list[str]:
    """Its weights alone are trained, and measured against the policy without it."""
    return quickstart(
        "model.adapter.rank=4",
        "objective.kl_coef=0.01",
        "optimizer.lr=0.01",
        "optimizer.lr_decay_style=linear",
    )


def teacher(folder: Path) -> list[str]:
    """Beside it an entropy coefficient that moves with every step."""
    return quickstart(
        f"objective.teacher={QUICKSTART / 'policy'}",
        "objective.distill_coef_reasoning=1.0",
        "objective.entropy_target=5",
        "objective.entropy_coef_reasoning=0.02",
        "training.updates_per_rollout=2",
    )


def supervised(folder: Path, *overrides: str) -> list[str]:
    rows = test_supervised.write_rows(folder / "rows.jsonl")
    options = test_supervised.options(rows, folder / "run", *overrides)
    return ["sft", "--config", str(QUICKSTART / "sft.yaml"), *options]


def supervised_adapter(folder: Path) -> list[str]:
    return supervised(folder, "model.adapter.rank=4")


FEATURES = [
    Feature(partial_rollouts),
    Feature(sources_of_which_groups_are_filtered),
    Feature(agents_with_a_confidence_at_every_turn, repeats),
    Feature(adapter),
    Feature(teacher),
    Feature(supervised),
    pytest.param(Feature(supervised_adapter), marks=pytest.mark.full),
]


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.words.__name__)
def test_a_killed_run_ends_as_one_that_nobody_killed(feature: Feature, tmp_path: Path) -> None:
    words = [*feature.words(tmp_path), *STEPS]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = run(*words, "training.keep_checkpoints=2", f"run_dir={whole}")
    assert done.returncode == 0, done.stderr[-3000:]
    cut_behind(1, whole, killed)
    done = run(*words, "training.keep_checkpoints=2", f"run_dir={killed}")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after step 1" in done.stderr
    assert_same_end(killed, whole, feature.repeats)
    if feature.repeats is not repeats:
        for file in (whole / "samples").glob("*.jsonl"):
            assert (killed / "samples" / file.name).read_bytes() == file.read_bytes(), file.name
