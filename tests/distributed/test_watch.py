"""A rank that dies, freezes, dawdles or fails while the others wait for it: named, and the job ends
or goes on.
"""

import json
import os
import signal
import subprocess

import pytest

from megatron_dcpo.errors import EXIT_PEER_LOST
from tests.helpers import warm
from tests.helpers.cases import full_only
from tests.helpers.launch import ranks, without_launcher, worker


def ended(scenario, directory, count=3):
    """The ranks of a job without a launcher, which would end the others when one ends."""
    words = worker(directory, ("watch", {"scenario": scenario}))[2:]
    environments = [os.environ | rank for rank in ranks(count)]
    return warm.run_apart("tests.distributed.worker", words, environments, timeout=180)


def assert_named(said, rank, pid):
    assert f"rank {rank} ends: lost rank 1 (" in said
    assert f"pid {pid}), in train of step 7 at watch.py:" in said
    assert "rank 2" not in said.split("lost", 1)[1]


def test_killed_rank_is_named_by_all_others(tmp_path):
    done = ended("killed", tmp_path)
    assert [rank.returncode for rank in done] == [EXIT_PEER_LOST, -signal.SIGKILL, EXIT_PEER_LOST]
    for rank in (0, 2):
        assert_named(done[rank].stderr, rank, done[1].pid)


@pytest.mark.full  # a killed one
def test_frozen_rank_is_named_by_all_others(tmp_path):
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = without_launcher("watch", 3, tmp_path, {"scenario": "frozen"}, **how)
    try:
        for rank in (0, 2):
            _, said = started[rank].communicate(timeout=180)
            assert started[rank].returncode == EXIT_PEER_LOST, said
            assert_named(said, rank, started[1].pid)
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_failed_rank_shows_its_own_error(tmp_path):
    done = ended("broken", tmp_path)
    assert "a mistake in the program" in done[1].stderr
    assert "rank 1 fails while all ranks are alive: rank 0" in done[1].stderr
    assert [rank.returncode for rank in done] == [EXIT_PEER_LOST, 1, EXIT_PEER_LOST]
    assert "lost rank 1" in done[0].stderr


def test_an_engine_that_fails_on_one_of_its_ranks_ends_all_by_name(tmp_path):
    for rank, process in enumerate(ended("engine", tmp_path, count=2)):
        assert process.returncode == EXIT_PEER_LOST, process.stderr
        assert (
            f"rank {rank} ends: the engine of ranks 0-1 failed on rank 1 alone: out of "
            "memory; rank(s) 0" in process.stderr
        )


def test_slow_phase_says_who_waits_where_and_goes_on(tmp_path):
    done = ended("slow", tmp_path)
    assert all("ended well" in rank.stdout for rank in done)
    warning = done[0].stderr
    assert "train of step 7 has taken" in warning
    assert "rank 0, 2: train of step 7 at watch.py" in warning
    assert "rank 1: train of step 7 at watch.py:" in warning
    assert " dawdle" in warning
    assert "dawdle" in (tmp_path / "stacks_rank00001.txt").read_text()
    assert json.loads((tmp_path / "rank00001.json").read_text())["phase"] == "done"


# a rollout may take longer than a collective waits; a signal of one rank reaches all
@pytest.mark.parametrize("scenario", full_only(("uneven", "signalled", "late"), ("late",)))
def test_all_end_well(scenario, tmp_path):
    done = ended(scenario, tmp_path)
    assert all("ended well" in rank.stdout for rank in done), done
