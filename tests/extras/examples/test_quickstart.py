"""Every recipe of the quickstart that no other test trains takes two steps as it stands, and leaves
what its comment says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.paths import EXAMPLES, QUICKSTART, REPOSITORY
from tests.helpers.quickstart import metrics, run

PROBE = f"{REPOSITORY / 'lab' / 'gradient_probe.py'}:every_step"
STEPS = ("training.steps=2", "data.prompts_per_step=8", "rollout.group_size=4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory in which the paths of the examples lead to their files."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


def trained(folder: Path, name: str, *overrides: str) -> Path:
    """The run directory of two steps of an example."""
    config = QUICKSTART / f"{name}.yaml"
    done = run("train", "--config", config, *STEPS, *overrides, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs" / Path(name).name


@pytest.mark.parametrize(
    "name",
    [
        *("coupled", "rlcr", "ccgspg", "trl_grpo", "nucleus", "confidence_first"),
        *("dr_grpo_pinned",),
    ],
)
def test_losses(name: str, folder: Path) -> None:
    rows = metrics(trained(folder, f"losses/{name}"))
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["updates/skipped"] == 0 for row in rows)
    assert rows[0]["grad_norm/total"] > 0


def test_the_confidence_alone_behind_a_policy_that_was_trained(folder: Path) -> None:
    (folder / "runs" / "grpo").mkdir(parents=True)
    (folder / "runs" / "grpo" / "policy").symlink_to(QUICKSTART / "policy")
    rows = metrics(trained(folder, "losses/posthoc", f"training.callback={PROBE}"))
    assert rows[0]["grad_norm/confidence"] > 0
    assert rows[0]["grad_norm/reasoning"] == 0


def test_partial_rollouts_carry_responses_over(folder: Path) -> None:
    rows = metrics(trained(folder, "partial", "rollout.max_num_seqs=8"))
    assert rows[0]["rollout/carried"] > 0
    assert "tis_masked" in rows[0]


def test_a_validated_run_keeps_its_best_checkpoint_and_goes_on(folder: Path) -> None:
    small = ("evaluation.interval=1", "evaluation.limit=4", "evaluation.samples=2")
    runs = trained(folder, "validated", *small)
    again = trained(folder, "validated", *small, "training.steps=3")
    assert again == runs
    assert [row["step"] for row in metrics(runs)] == [0, 1, 2, 3]
    assert all("evaluation/heldout/brier" in row for row in metrics(runs))
    assert (runs / "checkpoints" / "best.json").is_file()


def test_the_same_problems_in_every_step(folder: Path) -> None:
    limit = ("data.limit=8", "logging.samples_interval=1")
    run_dir = trained(folder, "overfit", *limit)
    first, second = (
        (run_dir / "samples" / f"step_00000{step}.jsonl").read_text().splitlines()
        for step in (1, 2)
    )
    assert len(first) == len(second) == 32
    assert [problem(line) for line in first] == [problem(line) for line in second]
    assert (run_dir / "policy" / "model.safetensors").is_file()


def problem(line: str) -> str:
    return str(json.loads(line)["problem"])


def test_an_adapter_and_further_steps_of_it(folder: Path) -> None:
    assert (trained(folder, "adapter") / "adapter" / "adapter_model.safetensors").is_file()
    assert (trained(folder, "adapter_more") / "policy").is_dir()
