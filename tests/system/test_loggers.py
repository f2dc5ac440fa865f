"""Loggers: imported only when asked for, named when missing, fed with what metrics.jsonl holds,
never the end of a run.
"""

import json
import os
from pathlib import Path

import pytest

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, metrics, run

NOTE = """
import json, os
def note(**values):
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(json.dumps(values, default=str) + "\\n")
"""
FAKES = {
    "wandb": NOTE
    + """
class Artifact:
    def __init__(self, name, type):
        self.files = []
    def add_file(self, path):
        self.files.append(os.path.basename(path))
class Run:
    id = "x"
    def log(self, values, step):
        note(step_of=step, **values)
    def log_artifact(self, artifact):
        note(artifacts=artifact.files)
    def finish(self):
        note(finished=True)
def init(config, **options):
    note(**options)
    assert config["seed"] == 1
    return Run()
""",
    "mlflow": NOTE
    + """
from types import SimpleNamespace
def set_experiment(name):
    note(project=name)
def start_run(run_id=None, run_name=None):
    note(resume=run_id, name=run_name)
    return SimpleNamespace(info=SimpleNamespace(run_id="id1"))
def log_params(values):
    assert values["seed"] == "1"
def log_metrics(values, step):
    note(step_of=step, **values)
kept = []
def log_artifact(path):
    kept.append(os.path.basename(path))
def end_run():
    note(artifacts=kept)
    note(finished=True)
""",
    "swanlab": NOTE
    + """
class Run:
    def log(self, values, step):
        note(step_of=step, **values)
    def finish(self):
        note(finished=True)
def init(config, **options):
    note(**options)
    return Run()
""",
    "trackio": NOTE
    + """
class Run:
    def log(self, metrics, step):
        note(step_of=step, **metrics)
    def finish(self):
        note(finished=True)
def init(project, name, resume, embed, config):
    note(project=project, resume=resume)
    assert config["seed"] == 1
    return Run()
""",
}


def train(tmp_path, *overrides, **environment):
    words = (
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        f"run_dir={tmp_path / 'run'}",
        *SMALL,
        *overrides,
    )
    paths = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    return run(*words, PYTHONPATH=paths, **environment)


def trained(tmp_path, name, *overrides):
    (tmp_path / f"{name}.py").write_text(FAKES[name])
    log = tmp_path / "log.jsonl"
    small = (
        "training.steps=2",
        f"logging.to=[{name}]",
        "logging.project=p",
    )
    done = train(tmp_path, *small, *overrides, FAKE_LOG=str(log))
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("name", FAKES)
def test_metrics_reach_the_project(tmp_path, name):
    notes = trained(tmp_path, name)
    steps = [note for note in notes if "step_of" in note]
    assert notes[0]["project"] == "p"
    assert notes[-1] == {"finished": True}
    assert name in ("swanlab", "trackio") or {"artifacts": ["config.yaml", "report.html"]} in notes
    assert [step.pop("step_of") for step in steps] == [1, 2]
    assert steps == [
        {k: v for k, v in row.items() if v is not None} for row in metrics(tmp_path / "run")
    ]


def test_a_resumed_run_continues_its_record(tmp_path):
    trained(tmp_path, "mlflow", "training.steps=1")
    notes = trained(tmp_path, "mlflow", "--resume", "auto")
    assert [note["resume"] for note in notes if "resume" in note] == [None, "id1"]
    assert [note["step_of"] for note in notes if "step_of" in note] == [1, 2]


def test_a_logger_that_fails_does_not_end_the_run(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class L:\n def log(self, step, metrics): raise OSError('no route')\n def finish(self, "
        "artifacts): 1 / 0\n"
        "def opened(directory, config, first_step): return L()\n"
    )
    done = train(tmp_path, "training.steps=2", "logging.to=[mine:opened]")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("OSError: no route") == 1
    assert "ZeroDivision" not in done.stderr
    assert len(metrics(tmp_path / "run")) == 2


def test_a_logger_that_cannot_be_opened_ends_the_run_in_one_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def opened(directory, config, first_step): raise OSError('no such project')\n"
    )
    done = train(tmp_path, "training.steps=1", "logging.to=[mine:opened]")
    assert done.returncode == 2
    assert "logging.to=mine:opened" in done.stderr
    assert "OSError: no such project" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("wandb", "the package wandb is not installed"),
        ("wanbd", "unknown logger; did you mean 'wandb'?"),
        ("none.py:opened", "no such file none.py"),
        ("json:loads", "expected a function (directory, config, first_step)"),
    ],
)
def test_what_cannot_be_opened_is_named_before_anything_is_done(tmp_path, to, said):
    done = train(tmp_path, f"logging.to=[{to}]", "--dry-run")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path(tmp_path, "run").exists()
