"""A rank that dies, freezes, dawdles or fails while the others wait for it: named, and the job ends
or goes on.
"""

import contextlib
import json
import signal
import subprocess

import pytest

from megatron_dcpo.errors import EXIT_PEER_LOST
from tests.helpers.cases import full_only
from tests.helpers.launch import without_launcher


@contextlib.contextmanager
def ranks(scenario, directory, count=3):
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = without_launcher("watch", count, directory, {"scenario": scenario}, **how)
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("scenario", full_only(("killed", "frozen"), ("frozen",)))
def test_lost_rank_is_named_by_all_others(scenario, tmp_path):
    with ranks(scenario, tmp_path) as started:
        for rank in (0, 2):
            _, said = started[rank].communicate(timeout=180)
            assert started[rank].returncode == EXIT_PEER_LOST, said
            assert f"rank {rank} ends: lost rank 1 (" in said
            assert f"pid {started[1].pid}), in train of step 7 at watch.py:" in said
            assert "rank 2" not in said.split("lost", 1)[1]
        assert started[1].poll() == (-signal.SIGKILL if scenario == "killed" else None)


def test_failed_rank_shows_its_own_error(tmp_path):
    with ranks("broken", tmp_path) as started:
        outcomes = [process.communicate(timeout=180)[1] for process in started]
        assert "a mistake in the program" in outcomes[1]
        assert "rank 1 fails while all ranks are alive: rank 0" in outcomes[1]
        assert [process.returncode for process in started] == [EXIT_PEER_LOST, 1, EXIT_PEER_LOST]
        assert "lost rank 1" in outcomes[0]


def test_an_engine_that_fails_on_one_of_its_ranks_ends_all_by_name(tmp_path):
    with ranks("engine", tmp_path, count=2) as started:
        for rank, process in enumerate(started):
            _, said = process.communicate(timeout=120)
            assert process.returncode == EXIT_PEER_LOST, said
            assert (
                f"rank {rank} ends: the engine of ranks 0-1 failed on rank 1 alone: out of "
                "memory; rank(s) 0" in said
            )


def test_slow_phase_says_who_waits_where_and_goes_on(tmp_path):
    with ranks("slow", tmp_path) as started:
        outcomes = [process.communicate(timeout=180) for process in started]
    assert all("ended well" in out for out, _ in outcomes)
    warning = outcomes[0][1]
    assert "train of step 7 has taken" in warning
    assert "rank 0, 2: train of step 7 at watch.py" in warning
    assert "rank 1: train of step 7 at watch.py:" in warning
    assert " dawdle" in warning
    assert "dawdle" in (tmp_path / "stacks_rank00001.txt").read_text()
    assert json.loads((tmp_path / "rank00001.json").read_text())["phase"] == "done"


def test_a_rollout_may_take_longer_than_a_collective_waits(tmp_path):
    with ranks("uneven", tmp_path) as started:
        outcomes = [process.communicate(timeout=180) for process in started]
        assert all("ended well" in out for out, _ in outcomes), outcomes


@pytest.mark.parametrize("scenario", full_only(("signalled", "late"), ("late",)))
def test_signal_of_one_rank_reaches_all_and_early_ends_are_not_missed(scenario, tmp_path):
    with ranks(scenario, tmp_path) as started:
        outcomes = [process.communicate(timeout=180) for process in started]
        assert all("ended well" in out for out, _ in outcomes)
