"""A shell's limit of open files does not limit a job: gloo connects every process group to each of
its ranks.
"""

import os
import resource
import subprocess
import sys

import pytest

from tests.helpers.launch import ENVIRONMENT
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, metrics

LIMIT = 64  # two ranks need more


@pytest.mark.parametrize(
    "launcher", [["megatron_dcpo", "launch", "2", "--"], ["torch.distributed.run", "--standalone"]]
)
def test_the_soft_limit_is_raised(tmp_path, launcher):
    if launcher[0].startswith("torch"):
        launcher += ["--nproc-per-node", "2", "-m", "megatron_dcpo"]
    small = [
        *SMALL,
        "training.steps=1",
    ]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            *launcher,
            "train",
            "--config",
            QUICKSTART / "grpo.yaml",
            f"run_dir={tmp_path}",
            *small,
        ],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        cwd=REPOSITORY,
        timeout=240,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, most)),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(metrics(tmp_path)) == 1
