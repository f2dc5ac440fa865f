"""Where a GPU is, commands and ranks of the suite are no forks: torch refuses CUDA to a fork of a
process that asked for it (``torch.cuda.is_available`` initializes the driver; the server's imports
call it).
"""

import os
import subprocess

import pytest

from tests.helpers import launch, warm

SAYS = """
import os, sys, time
print(os.environ["RANK"], os.getppid(), sys.argv[1:], "WARM" in os.environ)
if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    sys.exit(7)
if sys.argv[1] != "end":
    time.sleep(60)
"""


@pytest.fixture
def on_a_gpu(monkeypatch, tmp_path):
    def refused(_):
        raise AssertionError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(warm, "has_cuda", lambda: True, raising=False)
    monkeypatch.setattr(warm, "_server", refused)
    monkeypatch.setenv("WARM", "1")  # no process has it: it gets the environment that it is given
    (tmp_path / "says.py").write_text(SAYS)
    return [
        {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path), "RANK": str(rank)}
        for rank in range(2)
    ]


def test_every_rank_is_started_by_the_caller(on_a_gpu):
    done = warm.run("says", ["end", "2"], on_a_gpu, 60)
    expected = "".join(f"{rank} {os.getpid()} ['end', '2'] False\n" for rank in range(2))
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_rank_that_fails_ends_the_others(on_a_gpu):
    done = warm.run("says", ["fail"], on_a_gpu, 50)
    assert done.returncode == 7


def test_the_time_limit(on_a_gpu):
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run("says", ["wait"], on_a_gpu, 1)


def test_ranks_of_a_case(on_a_gpu, tmp_path):
    """What ``tests/gpu`` calls: no fork either."""
    results = launch.torchrun("device_of_rank", 2, tmp_path / "out", {})
    assert [result["parent"] for result in results] == [os.getpid()] * 2
    assert [result["rank"] for result in results] == ["0", "1"]
