"""A run directory says where its run comes from, and nothing of an earlier run is lost or changed
in silence.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from megatron_dcpo import __version__
from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import SMALL, metrics, run, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("provenance") / "run"
    train(directory, "training.steps=2", "training.save_interval=1")
    return directory


def again(source: Path, target: Path, *overrides: str, config: Path = QUICKSTART / "dcpo.yaml"):
    """Continue a copy of ``source`` by one step."""
    shutil.copytree(source, target)
    steps = ("training.steps=3", "training.save_interval=1", "--resume", "auto")
    return run("train", "--config", config, f"run_dir={target}", *SMALL, *overrides, *steps)


def test_the_directory_says_where_the_run_comes_from(finished: Path) -> None:
    (entry,) = json.loads((finished / "run.json").read_text())["launches"]
    assert entry["version"] == __version__
    assert entry["after_step"] == 0
    assert entry["command"][1] == "train"
    assert entry["processes"] == 1
    assert entry["libraries"]["megatron-core"]
    assert {"commit", "uncommitted_changes", "host", "device", "time", "python"} <= set(entry)
    assert set(entry["model"]) == {"path", "config_sha256", "tokenizer_sha256"}
    objective = yaml.safe_load((finished / "config.yaml").read_text())["objective"]
    assert objective["lam"] == 0.5  # the resolved value of an option that nobody set
    assert None not in objective.values()


def test_a_resume_says_what_differs_and_keeps_what_was(finished: Path, tmp_path: Path) -> None:
    changes = ("objective.lam=1.0", "optimizer.lr=1e-5", "optimizer.min_lr=1e-6")
    done = again(finished, tmp_path / "run", *changes, "optimizer.lr_decay_style=linear")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed with objective.lam=1.0, before 0.5" in done.stderr
    assert "resumed with optimizer.lr=1e-05, before 0.0003" in done.stderr
    assert "resumed with training.steps=3, before 2: the linear decay" in done.stderr
    assert "FutureWarning" not in done.stderr
    assert [
        entry["after_step"]
        for entry in json.loads((tmp_path / "run" / "run.json").read_text())["launches"]
    ] == [0, 2]
    (before,) = (tmp_path / "run").glob("config.until-*.yaml")
    assert yaml.safe_load(before.read_text())["objective"]["lam"] == 0.5
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["objective"]["lam"] == 1.0


def test_a_run_that_is_done_keeps_its_configuration(finished: Path, tmp_path: Path) -> None:
    changes = ("rollout.group_size=2", "training.steps=2")
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    before = (directory / "config.yaml").read_bytes()
    config = QUICKSTART / "dcpo.yaml"
    settings = (*SMALL, *changes, "--resume", "auto")
    done = run("train", "--config", config, f"run_dir={directory}", *settings)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rollout.group_size=2 changes nothing" in done.stderr
    assert (directory / "config.yaml").read_bytes() == before
    assert len(json.loads((directory / "run.json").read_text())["launches"]) == 1


@pytest.mark.parametrize("what", ["method", "model", "tokenizer"])
def test_a_resume_refuses_what_cannot_change(finished: Path, tmp_path: Path, what: str) -> None:
    """One line, and every file stays as it was."""
    overrides, name = [], "dcpo"
    if what == "method":
        name = "grpo"
    else:
        shutil.copytree(QUICKSTART / "policy", tmp_path / "other")
        changed = tmp_path / "other" / {"model": "config.json", "tokenizer": "tokenizer.json"}[what]
        changed.write_text(changed.read_text() + "\n")
        overrides = [f"model.path={tmp_path / 'other'}"]
    done = again(finished, tmp_path / "run", *overrides, config=QUICKSTART / f"{name}.yaml")
    assert done.returncode == 2, done.stderr[-2000:]
    line = done.stderr.strip().splitlines()[-1]
    expected = (
        "started with objective.name=dcpo, not grpo"
        if what == "method"
        else f"started with another {what}"
    )
    assert expected in line
    for name in ("config.yaml", "run.json", "metrics.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()


def test_a_run_without_a_checkpoint_is_moved_aside(finished: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished, directory, ignore=shutil.ignore_patterns("checkpoints"))
    (directory / "notes.txt").write_text("the user's own")
    train(directory, "training.steps=1")
    assert len(metrics(directory)) == 1
    for name in ("metrics.jsonl", "config.yaml", "run.json", "policy/model.safetensors"):
        assert (tmp_path / "run.1" / name).read_bytes() == (finished / name).read_bytes()
    assert (directory / "notes.txt").is_file()


def test_a_hopeless_run_says_so(tmp_path: Path) -> None:
    """A policy that cannot finish a response within two tokens: everything is malformed."""
    overrides = ("rollout.max_response_length=2", "training.steps=5")
    done = run(
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        f"run_dir={tmp_path / 'run'}",
        *SMALL,
        *overrides,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no response states a valid confidence" in done.stderr
    assert {
        json.loads(line)["watcher"] for line in (tmp_path / "run" / "warnings.jsonl").open()
    } >= {"all_malformed"}
