"""One operation of the file system fails once, at each kind of file that a run writes: one line,
and a resumed run has every row, every sample and the numbers of a run that nothing disturbed.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.cases import full_only
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, command, metrics, without_clocks

STEPS = 4
OPTIONS = [
    "train",
    "--config",
    str(QUICKSTART / "dcpo.yaml"),
    *SMALL,
    f"training.steps={STEPS}",
    "training.save_interval=2",
    "training.keep_checkpoints=1",
    "logging.samples_interval=1",
    "--resume",
    "auto",
]
FULL = errno.ENOSPC
BROKEN = errno.EIO
# operation, part of the path, which of them, error
FAULTS = [
    ("write", "/metrics.jsonl", 2, FULL),
    ("rename", "/samples/step_000004", 1, BROKEN),
    ("open", "/metrics.jsonl", 4, BROKEN),
    ("fsync", "/metrics.jsonl", 2, BROKEN),
    ("write", "/mismatch.jsonl", 2, FULL),
    ("write", "/samples/step_000002", 1, FULL),
    ("mkdir", "/run/samples", 1, FULL),
    ("write", ".distcp", 3, FULL),
    ("open", "/common.pt", 2, BROKEN),
    ("mkdir", "/iter_0000002", 1, FULL),
    ("rename", "/iter_0000002", 1, BROKEN),
    ("rename", "/latest_checkpointed_iteration", 1, FULL),
    ("unlink", "common.pt", 1, BROKEN),
    ("write", "/config.yaml", 1, FULL),
    ("rename", "/run.json", 1, BROKEN),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the library that is preloaded")
    built = tmp_path_factory.mktemp("fault") / "fault.so"
    source = REPOSITORY / "tests" / "helpers" / "fault.c"
    build = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(source), "-ldl"]
    subprocess.run(build, check=True)
    return built


def train(run_dir: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, into which a library can be preloaded."""
    return subprocess.run(
        command(*OPTIONS, f"run_dir={run_dir}"),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = train(run_dir)
    assert done.returncode == 0, done.stderr[-2000:]
    return run_dir


@pytest.mark.parametrize(
    "fault", full_only(FAULTS, full=FAULTS[1:]), ids=lambda fault: ":".join(fault[:2])
)
def test_one_operation_that_fails_costs_nothing_for_good(
    fault: tuple[str, str, int, int], library: Path, undisturbed: Path, tmp_path: Path
) -> None:
    operation, part, number, error = fault
    run_dir = tmp_path / "run"
    failing = f"{operation}:{part}:{number}:{error}"
    disturbed = train(run_dir, LD_PRELOAD=str(library), FAULT=failing)
    assert disturbed.returncode in (0, 2), disturbed.stderr[-2000:]
    assert f"fault met: {failing}" in disturbed.stderr
    assert "Traceback" not in disturbed.stderr
    if disturbed.returncode:
        assert os.strerror(error) in disturbed.stderr.replace(failing, "")
    resumed = train(run_dir)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert without_clocks(rows) == without_clocks(metrics(undisturbed))
    for step in range(1, STEPS + 1):
        name = f"samples/step_{step:06d}.jsonl"
        assert (run_dir / name).read_bytes() == (undisturbed / name).read_bytes()
    latest = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == str(STEPS)
