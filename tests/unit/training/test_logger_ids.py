"""Under which id a logger knows a run: a resumed run keeps it, every other run has a new one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megatron_dcpo.training.loggers import known_id, remember_id


def test_a_resumed_run_keeps_its_id_and_a_new_one_does_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert known_id(run, "wandb", first_step=1) is None
    remember_id(run, "wandb", "a1")
    remember_id(run, "mlflow", "b2")
    assert known_id(run, "wandb", first_step=5) == "a1"
    assert known_id(run, "mlflow", first_step=5) == "b2"
    assert known_id(run, "swanlab", first_step=5) is None
    assert known_id(run, "wandb", first_step=1) is None, "begun again from the start"
    shutil.rmtree(run)
    run.mkdir()
    assert known_id(run, "wandb", first_step=5) is None, "another run of the same path"


def test_a_copy_of_the_directory_is_another_run_and_a_moved_one_is_not(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    remember_id(run, "wandb", "a1")
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    assert known_id(copied, "wandb", first_step=5) is None
    moved = run.rename(tmp_path / "moved")
    assert known_id(moved, "wandb", first_step=5) == "a1"
    remember_id(copied, "wandb", "c3")
    assert known_id(copied, "wandb", first_step=5) == "c3"


def test_an_entry_of_another_form_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "logger_ids.json").write_text(json.dumps({"wandb": ["a1"]}))
    assert known_id(tmp_path, "wandb", first_step=2) is None
