"""Weights & Biases: imported only when asked for, named when missing, fed with what metrics.jsonl holds."""

import json
import os
import subprocess
from pathlib import Path

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, command, metrics

FAKE = """
import json, os
class Run:
    def log(self, values, step):
        with open(os.environ["FAKE_WANDB"], "a") as file:
            file.write(json.dumps({"step_of": step, **values}) + "\\n")
    def finish(self):
        with open(os.environ["FAKE_WANDB"], "a") as file:
            file.write(json.dumps({"finished": True}) + "\\n")
def init(**options):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        file.write(json.dumps({k: v for k, v in options.items() if k != "config"}) + "\\n")
    assert options["config"]["seed"] == 1
    return Run()
"""


def train(tmp_path, *overrides, **environment):
    words = ("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path / 'run'}", *SMALL, *overrides)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command(*words), capture_output=True, text=True, cwd=REPOSITORY, env=environment, timeout=300)


def test_metrics_reach_the_project(tmp_path):
    (tmp_path / "wandb.py").write_text(FAKE)
    log = tmp_path / "log.jsonl"
    paths = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = train(
        tmp_path, "logging.wandb_project=p", "training.steps=2", "training.export_hf=false",
        PYTHONPATH=paths, FAKE_WANDB=str(log),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    opened, *steps, closed = map(json.loads, log.read_text().splitlines())
    assert opened["project"] == "p"
    assert opened["resume"] == "allow"
    assert closed == {"finished": True}
    assert [s["step_of"] for s in steps] == [1, 2]
    for ours, theirs in zip(steps, metrics(tmp_path / "run"), strict=True):
        ours.pop("step_of")
        assert ours == {k: v for k, v in theirs.items() if v is not None}


def test_missing_package_is_named_before_anything_is_done(tmp_path):
    done = train(tmp_path, "logging.wandb_project=p", "--dry-run")
    assert done.returncode == 2
    assert "the package wandb is not installed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(tmp_path, "run").exists()
