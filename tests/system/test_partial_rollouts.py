"""``rollout.max_staleness``: a rollout ends when its batch is full, and the next step goes on with
what is unfinished.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.errors import EXIT_REQUEUE
from megatron_dcpo.training.mismatch import ROUTING_MISMATCH_THRESHOLD
from tests.helpers.launch import alone
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SMALL, metrics, train, without_clocks

PARTIAL = (
    # of all problems: every step carries something
    f"data.path={QUICKSTART / 'data' / 'train.jsonl'}",
    "rollout.max_staleness=1",
    "rollout.oversample=1.5",
    "objective.tis_level=token",
    "logging.samples_interval=1",
)
NAMES = (
    "rollout/carried",
    "rollout/staleness_mean",
    "rollout/staleness_max",
    "rollout/utilization",
)


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("carried") / "run"
    train(run_dir, *PARTIAL, "training.steps=4")
    return run_dir


def test_a_run_carries_and_corrects(carried: Path) -> None:
    records = metrics(carried)
    assert all(record["rollout/carried"] > 0 for record in records)
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 1, 1]
    assert all(0 < record["rollout/staleness_mean"] < 1 for record in records[1:])
    assert all(0 < record["rollout/utilization"] <= 1 for record in records)
    assert records[0]["tis_weight"] == pytest.approx(1, abs=1e-5)
    assert all(abs(record["tis_weight"] - 1) > 1e-5 for record in records[1:]), (
        "old tokens have other weights"
    )
    assert records[0]["engine/kl"] < 1e-9 < records[1]["engine/kl"]
    assert not tokens_apart(carried, step=1)
    apart = tokens_apart(carried, step=2)
    assert apart
    assert min(apart) >= ROUTING_MISMATCH_THRESHOLD["fp32"]
    assert max(apart) <= records[1]["engine/logprob_diff_max"] + 1e-4


def tokens_apart(run_dir: Path, step: int) -> list[float]:
    """How far engine and trainer are apart on the tokens that are shown to be."""
    lines = (run_dir / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()
    pieces = [piece for line in lines for piece in json.loads(line)["pieces"]]
    return [piece[3] for piece in pieces if len(piece) > 3]


def test_without_the_option_what_is_carried_is_not_thrown_away(
    carried: Path, tmp_path: Path
) -> None:
    done = alone(
        "failing_engine",
        tmp_path,
        options("none", carried, "rollout.max_staleness=0", "rollout.oversample=1"),
    )
    assert done.returncode == 2
    assert "the checkpoint of step 4 carries responses that the next step continues" in done.stderr
    done = alone(
        "failing_engine", tmp_path, options("none", carried, "rollout.max_response_length=4")
    )
    assert done.returncode == 2
    assert "set rollout.max_response_length above that to resume" in done.stderr


def options(mode: str, run_dir: Path, *overrides: str) -> dict[str, Any]:
    settings = [f"run_dir={run_dir}", *SMALL, *PARTIAL, "training.steps=6", *overrides]
    return {"mode": mode, "overrides": ["--resume", "auto", *settings]}


def test_a_signal_in_the_rollout_loses_nothing(carried: Path, tmp_path: Path) -> None:
    done = alone(
        "failing_engine", tmp_path, options("signal", tmp_path / "run", "training.steps=4")
    )
    assert done.returncode == EXIT_REQUEUE, done.stderr[-2000:]
    assert "stopped by SIGTERM after step 2 of 4, saved" in done.stderr
    records = train(tmp_path / "run", *PARTIAL, "training.steps=4", "--resume", "auto")
    assert without_clocks(records) == without_clocks(metrics(carried))


def test_an_engine_that_fails_goes_on_behind_what_was_finished(
    carried: Path, tmp_path: Path
) -> None:
    done = alone(
        "failing_engine", tmp_path, options("midway", tmp_path / "run", "training.steps=4")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "is restarted" in done.stderr
    for ours, single in zip(metrics(tmp_path / "run"), metrics(carried), strict=True):
        for name in ("reward/accuracy", "rollout/carried", "rollout/staleness_mean", "length/mean"):
            assert ours[name] == single[name], name
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-5)


def test_two_engines_carry_too_and_go_on_from_one(carried: Path, tmp_path: Path) -> None:
    """Each fills its half of the batch. What one engine carried, two continue."""
    train(tmp_path / "one", *PARTIAL, "training.steps=2")
    resumed = train(tmp_path / "one", *PARTIAL, "training.steps=4", "--resume", "auto", processes=2)
    assert without_clocks(resumed)[:2] == without_clocks(metrics(carried))[:2]
    for record in (
        *resumed[2:],
        *train(tmp_path / "two", *PARTIAL, "training.steps=3", processes=2)[1:],
    ):
        assert all(np.isfinite(record[name]) for name in NAMES)
        assert (record["rollout/staleness_max"], record["rollout/carried"] > 0) == (1, True)
