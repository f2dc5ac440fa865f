"""A job whose port another process has ends with status 2 and one line: a requeue would meet the
same (newcomer, 22).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import QUICKSTART
from tests.helpers.quickstart import run

pytestmark = pytest.mark.slow


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_of_a_rank(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    done = run("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 2, done.stderr
    line = done.stderr.splitlines()[-1]  # before it, what was read of the data
    assert (
        line
        == f"dcpo train: error: port {port} (MASTER_PORT) is in use by another process; choose "
        "another one"
    )
    assert not (tmp_path / "run").exists()


def test_of_the_launcher(port: int, tmp_path: Path) -> None:
    options = ("--master-addr", "127.0.0.1", "--master-port", port)
    done = run(
        "launch",
        "1",
        *options,
        "--",
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        f"run_dir={tmp_path / 'run'}",
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert (
        line
        == f"dcpo launch: error: port {port} (--master-port) is in use by another process; choose "
        "another one"
    )
    assert not (tmp_path / "run").exists()
