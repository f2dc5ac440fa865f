"""A checkpoint that somebody else wrote cannot run code when a training is resumed from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hostile_checkpoint import HOSTILE, resign
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import FEW_PROBLEMS, metrics, run

pytestmark = pytest.mark.slow

TRAIN = (
    "train",
    "--config",
    str(QUICKSTART / "dcpo.yaml"),
    "--resume",
    "auto",
    FEW_PROBLEMS,
    "data.prompts_per_step=4",
    "rollout.group_size=4",
    "training.micro_batch_size=8",
    "logging.to=[]",
    "logging.samples_interval=0",
    "training.save_interval=1",
)


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one") / "run"
    done = run(*TRAIN, f"run_dir={directory}", "training.steps=1")
    assert done.returncode == 0, done.stderr[-2000:]
    return directory


@pytest.fixture
def copied(one_step: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one_step, tmp_path / "run"))


WHOLE = (
    "code in the metadata",
    "code beside the tensors",
    "code in common.pt",
    "an odd number",
    "a terabyte",
    "a file elsewhere",
)


@pytest.mark.parametrize("name", WHOLE)
def test_a_hostile_checkpoint_is_one_line(copied: Path, tmp_path: Path, name: str) -> None:
    craft, said = HOSTILE[name]
    witness, checkpoint = tmp_path / "witness", copied / "checkpoints" / "iter_0000001"
    craft(checkpoint, f"touch {witness}")
    resign(checkpoint)
    done = run(*TRAIN, f"run_dir={copied}", "training.steps=2")
    lines = [line for line in done.stderr.splitlines() if line.startswith("dcpo train: error: ")]
    assert (done.returncode, len(lines)) == (2, 1), done.stderr[-3000:]
    assert re.search(said, lines[0]), lines[0]
    assert str(checkpoint) in lines[0]
    assert "Traceback" not in done.stderr
    assert not witness.exists()
    assert [record["step"] for record in metrics(copied)] == [1]


AUDITED = """
import sys, traceback
def hook(event, arguments):
    if event == "pickle.find_class" and "distributed_c10d" not in "".join(traceback.format_stack()):
        print("LOOKED UP", *arguments[-2:], file=sys.stderr)
sys.addaudithook(hook)
import pickle
pickle.loads(pickle.dumps(sys.exit))  # the hook sees what it should
from megatron_dcpo.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_honest_resumption_looks_up_nothing_that_a_file_names(copied: Path) -> None:
    """The full unpickler is used on what the ranks send each other, and on no file."""
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, *TRAIN, f"run_dir={copied}", "training.steps=2"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after step 1" in done.stderr
    assert re.findall("LOOKED UP (.*)", done.stderr) == ["sys exit"]
