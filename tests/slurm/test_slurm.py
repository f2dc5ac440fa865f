"""The shipped batch script on a real Slurm of two nodes: warned, requeued, resumed, finished; bad input is not requeued.

``make test-slurm`` installs Slurm and runs this; the ordinary suite skips it.
"""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.multinode import nodes
from tests.slurm import cluster as slurm_cluster
from tests.system.test_training import QUICKSTART, REPOSITORY, SMALL, metrics, run, without_clocks

if os.environ.get("DCPO_TEST_SLURM") != "1":
    pytest.skip("starts a Slurm of two nodes: make test-slurm", allow_module_level=True)

STEPS = 40
FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def cluster():
    problem = nodes.why_not() or slurm_cluster.why_not()
    assert not problem, problem  # asked for by name: not being able to is a failure
    with slurm_cluster.slurm() as running:
        yield running


def submit(cluster, run_dir, *overrides):
    logs = run_dir.parent / "logs"
    environment = {
        "GLOO_SOCKET_IFNAME": nodes.LINK,
        "OMP_NUM_THREADS": "1",
        "DCPO_LOGS": str(logs),
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = [QUICKSTART / "dcpo.yaml", f"run_dir={run_dir}", *SMALL, "training.export_hf=false", *overrides]
    header = ["--parsable", "--nodes=2", "--gpus-per-node=1", f"--output={run_dir.parent}/job.log"]
    script = REPOSITORY / "examples" / "slurm" / "train.sbatch"
    return cluster.call("sbatch", *header, script, *words, environment=environment, cwd=REPOSITORY).strip(), logs


def wait_for(condition, log, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "no log"
        time.sleep(0.2)


def finish(cluster, job, log, seconds=420):
    wait_for(lambda: cluster.job(job)["JobState"] in FINISHED, log, seconds)
    return cluster.job(job)


def test_warned_job_is_requeued_resumes_and_finishes(cluster, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    job, logs = submit(cluster, run_dir, f"training.steps={STEPS}", "training.save_interval=0")
    wait_for(lambda: log.exists() and "step 3/" in log.read_text(), log, 300)
    cluster.call("scancel", "--signal=USR1", "--batch", job)  # what --signal=B:USR1@900 does 15 minutes before the end

    facts = finish(cluster, job, log)
    said = log.read_text()
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("COMPLETED", "1", "0:0"), said[-3000:]
    assert "stopped by SIGUSR1" in said
    assert "after a warning" in said
    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    # one folder per attempt and node, one file per rank
    for attempt in (f"{job}-0", f"{job}-1"):
        for node in cluster.nodes:
            assert list((logs / attempt / node.name).rglob("stderr.log")), f"{attempt} on {node.name} left no log"

    whole = tmp_path / "whole"
    words = ("train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={whole}", *SMALL, "training.export_hf=false")
    done = run(*words, f"training.steps={STEPS}", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert without_clocks(records) == without_clocks(metrics(whole)), "a requeued run differs from an uninterrupted one"


def test_killed_rank_is_requeued_from_the_last_checkpoint(cluster, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    job, logs = submit(cluster, run_dir, f"training.steps={STEPS}", "training.save_interval=2")
    wait_for(lambda: log.exists() and "step 5/" in log.read_text(), log, 300)
    worker = next(pid for pid in cluster.nodes[1].processes() if is_worker(pid))
    os.kill(worker, 9)
    facts = finish(cluster, job, log)
    said = log.read_text()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), said[-3000:]
    assert (logs / f"{job}.crashes").read_text().startswith(f"{job}-0 ")
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, STEPS + 1))


def test_bad_input_is_not_requeued(cluster, tmp_path):
    job, _ = submit(cluster, tmp_path / "run", "data.path=/nowhere.jsonl")
    facts = finish(cluster, job, tmp_path / "job.log")
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "2:0")
    assert "/nowhere.jsonl" in (tmp_path / "job.log").read_text()


def is_worker(pid):
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return "train" in words and "launch" not in words and any(word.endswith("megatron_dcpo") for word in words)
