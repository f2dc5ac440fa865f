"""A shell's limit of open files does not limit a job: gloo connects every process group to each of
its ranks. And a file has one writer: on a shared disk others would wait for its lock.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launch import ENVIRONMENT
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, metrics

LIMIT = 64  # two ranks need more


# an audit hook of Python that notes which rank opens a file for writing
NOTES = """
import os, sys
def note(event, args):
    if event == "open" and str(args[0]).startswith(os.environ["WATCHED"]) and "w" in str(args[1]):
        with open(os.environ["NOTED"] + os.environ.get("RANK", ""), "a") as file:
            print(args[0], file=file)
sys.addaudithook(note)
"""


@pytest.mark.parametrize(
    "launcher", [["megatron_dcpo", "launch", "2", "--"], ["torch.distributed.run", "--standalone"]]
)
def test_the_soft_limit_is_raised(tmp_path, launcher):
    if launcher[0].startswith("torch"):
        launcher += ["--nproc-per-node", "2", "-m", "megatron_dcpo"]
    small = [*SMALL, "training.steps=1", "training.save_interval=1"]
    (tmp_path / "sitecustomize.py").write_text(NOTES)
    watched = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]]),
        "WATCHED": str(tmp_path / "run"),
        "NOTED": str(tmp_path / "noted"),
    }
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *launcher,
            "train",
            "--config",
            QUICKSTART / "grpo.yaml",
            f"run_dir={tmp_path / 'run'}",
            *small,
        ],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT | watched,
        cwd=REPOSITORY,
        timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, most)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(metrics(tmp_path / "run")) == 1
    first, second = (set((tmp_path / f"noted{rank}").read_text().split()) for rank in (0, 1))
    assert not first & second
    assert {Path(name).suffix for name in second} <= {".distcp", ".tmp"}, "its part, its heartbeat"
    assert any(name.endswith("tokenizer.json") for name in first)
