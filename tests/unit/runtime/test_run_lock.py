"""One training per run directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime import run_lock

HOLDER = r"""
import os, sys, time
from pathlib import Path
from megatron_dcpo.runtime import run_lock
run_lock.broadcast_object = lambda value: value
with run_lock.lock_run_dir(Path(sys.argv[1]), rank=0):
    if os.fork() == 0:
        os.setsid()
    os.write(1, f"{os.getpid()}\n".encode())
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "broadcast_object", lambda value: value)
    monkeypatch.setattr(run_lock, "PATIENCE_SECONDS", 0.2)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """A process that holds ``tmp_path / "run"``, and a child of its own that outlives it; their
    pids.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    pids = {int(process.stdout.readline()) for _ in range(2)}
    yield process, pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def test_a_second_training_is_refused_and_a_killed_one_leaves_nothing(
    tmp_path: Path, holder
) -> None:
    process, _ = holder
    message = f"another training is running in .*run .pid {process.pid} on .*another run_dir"
    with pytest.raises(UserError, match=message), run_lock.lock_run_dir(tmp_path / "run", rank=0):
        pass
    process.kill()
    process.wait()
    with run_lock.lock_run_dir(tmp_path / "run", rank=0):
        assert (tmp_path / "run" / "lock").read_text().startswith(f"pid {os.getpid()} on ")
    with run_lock.lock_run_dir(tmp_path / "run", rank=0):
        pass


def test_other_ranks_and_file_systems_without_locks_are_not_in_the_way(
    tmp_path: Path, holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_lock.lock_run_dir(tmp_path / "run", rank=1):
        pass

    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "lockf", unsupported)
    with run_lock.lock_run_dir(tmp_path / "run", rank=0):
        pass


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = r"cannot write in run_dir .*file/run \(Not a directory\)"
    with (
        pytest.raises(UserError, match=message),
        run_lock.lock_run_dir(tmp_path / "file" / "run", rank=0),
    ):
        pass
