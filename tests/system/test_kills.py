"""Verbs that go on from what they have saved, killed at random moments, every other time while they
write: the same command continues them, and in the end every file is that of a run that nothing
disturbed. DCPO_KILLS of each (``make test-resilience``: 30).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.kills import KILLS, KILLS_OF_A_ROUND, killed_in_rounds
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import FEW_PROBLEMS, metrics, run, without_clocks

POLICY = QUICKSTART / "policy"
pytestmark = pytest.mark.timeout(1800)  # of thirty kills
EVALUATED = (
    "evaluate",
    *("--model", POLICY, "--template", "raw", "--engine", "transformers"),
    *("--repeats", 2, "--max-tokens", 32, "--temperature", 1, "--top-p", 1, "--resamples", 0),
)
SMALL = (
    FEW_PROBLEMS,
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "training.micro_batch_size=8",
    "training.steps=4",
    "training.save_interval=1",
    "logging.to=[]",
    "logging.samples_interval=1",
)
# of when, where and by what a run was made, and what a run leaves for the next one
NOT_RESULTS = ("run.json", "config.yaml", "lock")


def files_of(directory: Path) -> dict[str, object]:
    """Return the contents of all files in a directory but those of checkpoints and clocks."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        is_left_out = name.startswith(("checkpoints", "heartbeat", "metrics.jsonl", "diagrams"))
        if path.is_file() and not is_left_out and name not in NOT_RESULTS:
            found[name] = path.read_bytes().replace(str(directory).encode(), b"RUN")
    return found


def training_of(directory: Path) -> dict[str, object]:
    """Return what a training leaves, and its metrics without clocks."""
    return {**files_of(directory), "metrics.jsonl": without_clocks(metrics(directory))}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapter") / "run"
    words = ("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={directory}", *SMALL)
    done = run(*words, "training.steps=1", "model.adapter.rank=4", "optimizer.lr=0.01")
    assert done.returncode == 0, done.stderr[-2000:]
    return directory / "adapter"


def assert_killed(rounds: Any) -> None:
    print(rounds)
    assert rounds.killed >= KILLS
    assert rounds.compared >= -(-KILLS // KILLS_OF_A_ROUND)


@pytest.mark.full
def test_a_training_that_starts_from_an_adapter(adapter: Path, tmp_path: Path) -> None:
    def words(directory: Path) -> tuple[object, ...]:
        return (
            *("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={directory}"),
            *("--resume", "auto", *SMALL, f"model.adapter.path={adapter}"),
            *("optimizer.lr=0.01", "objective.kl_coef=0.01"),
        )

    assert_killed(killed_in_rounds(words, training_of, tmp_path))


def test_an_evaluation(tmp_path: Path) -> None:
    benchmarks = ",".join(
        f"{name}={QUICKSTART / 'data' / name}.jsonl" for name in ("train", "heldout")
    )

    def words(directory: Path) -> tuple[object, ...]:
        asked = ("--benchmarks", benchmarks, "--limit", 20, "--json")
        return (*EVALUATED, "--out", directory, *asked)

    assert_killed(killed_in_rounds(words, files_of, tmp_path))
