"""``rollout.filter_groups``: prompts are drawn until enough groups are informative; the next step
goes on behind the last one consumed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import metrics, run, train

FILTER = ("rollout.filter_groups=true", "rollout.oversample=1.5", "logging.samples_interval=1")


@pytest.fixture(scope="module")
def filtered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("filtered") / "run"
    train(run_dir, *FILTER, "training.steps=4", method="grpo")
    return run_dir


def test_every_step_of_a_filtered_run_has_its_informative_groups(filtered: Path) -> None:
    records = metrics(filtered)
    assert any(record["signal/reasoning"] < 1 for record in records), (
        "every group was informative: choose another seed"
    )
    total = 0
    for record in records:
        assert record["rollout/informative_groups"] == 8
        total += 8
        assert record["rollout/informative_groups_total"] == total
        batch = record["rollout/prompts_drawn"] - record["rollout/groups_filtered"]
        assert record["signal/reasoning"] == pytest.approx(8 / batch)
        assert record["rollout/responses"] == 4 * record["rollout/prompts_drawn"]


def test_two_engines_decide_alike(filtered: Path, tmp_path: Path) -> None:
    for ours, single in zip(
        train(tmp_path / "run", *FILTER, "training.steps=4", method="grpo", processes=2),
        metrics(filtered),
        strict=True,
    ):
        for name in (
            "rollout/prompts_drawn",
            "rollout/groups_filtered",
            "rollout/informative_groups",
            "rollout/responses_total",
            "rollout/accuracy",
            "reward/accuracy",
        ):
            assert ours[name] == single[name]
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-5)


def test_a_run_of_dull_groups_goes_on_with_a_line(tmp_path: Path) -> None:
    """Nearly greedy sampling: the responses of a group are all the same."""
    arguments = [
        "train",
        "--config",
        QUICKSTART / "grpo.yaml",
        f"run_dir={tmp_path / 'run'}",
        *FILTER,
    ]
    arguments += [
        "rollout.temperature=0.001",
        "rollout.max_refills=1",
        "training.steps=1",
        "logging.to=[]",
    ]
    done = run(*arguments, "data.prompts_per_step=4", "rollout.group_size=2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("rollout.max_refills=1") == 1
    (record,) = metrics(tmp_path / "run")
    assert record["grad_norm/total"] == 0
