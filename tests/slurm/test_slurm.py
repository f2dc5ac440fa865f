"""The shipped batch script on a real Slurm of two nodes: warned, requeued, resumed, finished; a
rank, a node killed; what will fail again is not requeued.

``make test-slurm`` installs Slurm and runs this; the ordinary suite skips it.
"""

import os
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, metrics, run, without_clocks
from tests.multinode import nodes
from tests.slurm import cluster as slurm_cluster

if os.environ.get("DCPO_TEST_SLURM") != "1":
    pytest.skip("starts a Slurm of two nodes: make test-slurm", allow_module_level=True)

SCRIPT = REPOSITORY / "examples" / "slurm" / "train.sbatch"
STEPS = 40
FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def cluster():
    problem = nodes.why_not() or slurm_cluster.why_not()
    assert not problem, problem  # asked for by name: not being able to is a failure
    with slurm_cluster.slurm() as running:
        yield running


def submit(cluster, run_dir, *overrides, number_of_nodes=2):
    logs = run_dir.parent / "logs"
    environment = {
        "GLOO_SOCKET_IFNAME": nodes.LINK,
        "OMP_NUM_THREADS": "1",
        "DCPO_LOGS": str(logs),
        "PYTHONPATH": str(REPOSITORY),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    words = [
        QUICKSTART / "dcpo.yaml",
        f"run_dir={run_dir}",
        *SMALL,
        *overrides,
    ]
    header = [
        "--parsable",
        f"--nodes={number_of_nodes}",
        "--gpus-per-node=1",
        f"--output={run_dir.parent}/job.log",
    ]
    return cluster.call(
        "sbatch", *header, SCRIPT, *words, environment=environment, cwd=REPOSITORY
    ).strip(), logs


def wait_for(condition, log, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log.exists() else "no log"
        time.sleep(0.5)


def finish(cluster, job, log, seconds=420):
    wait_for(lambda: cluster.job(job)["JobState"] in FINISHED, log, seconds)
    return cluster.job(job)


def test_warned_job_is_requeued_resumes_and_finishes(cluster, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    job, logs = submit(cluster, run_dir, f"training.steps={STEPS}", "training.save_interval=0")
    wait_for(lambda: log.exists() and "step 3/" in log.read_text(), log, 300)
    cluster.call(
        "scancel", "--signal=USR1", "--batch", job
    )  # what --signal=B:USR1@900 does 15 minutes before the end

    facts = finish(cluster, job, log)
    said = log.read_text()
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("COMPLETED", "1", "0:0"), (
        said[-3000:]
    )
    assert facts["OverSubscribe"] == "NO", "the job has its nodes for itself"
    assert "stopped by SIGUSR1" in said
    assert "after a warning" in said
    records = metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    # one folder per attempt and node, one file per rank
    for attempt in (f"{job}-0", f"{job}-1"):
        for node in cluster.nodes:
            assert list((logs / attempt / node.name).rglob("stderr.log")), (
                f"{attempt} on {node.name} left no log"
            )

    whole = tmp_path / "whole"
    words = (
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        f"run_dir={whole}",
        *SMALL,
    )
    done = run(*words, f"training.steps={STEPS}", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert without_clocks(records) == without_clocks(metrics(whole)), (
        "a requeued run differs from an uninterrupted one"
    )


def test_a_cancelled_job_saves_and_stays_cancelled(cluster, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    job, _ = submit(cluster, run_dir, f"training.steps={STEPS}", "training.save_interval=0")
    wait_for(lambda: log.exists() and "step 3/" in log.read_text(), log, 300)
    cluster.call("scancel", job)
    wait_for(lambda: "cancelled: not requeued" in log.read_text(), log, 120)
    wait_for(lambda: cluster.job(job)["JobState"] == "CANCELLED", log, 120)
    time.sleep(5)
    facts = cluster.job(job)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0")
    assert list((run_dir / "checkpoints").glob("iter_*")), "what was done is saved"


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


def test_killed_node_is_requeued_when_it_is_back(cluster, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    job, _ = submit(cluster, run_dir, f"training.steps={STEPS}", "training.save_interval=2")
    wait_for(lambda: log.exists() and "step 5/" in log.read_text(), log, 300)
    cluster.nodes[1].kill()  # slurmd and all that it started
    # 30 s until Slurm or we count it as lost, 15 s until the launcher of the other node leaves
    wait_for(lambda: cluster.job(job)["JobState"] != "RUNNING", log, 90)
    cluster.call("slurmd", node=1)
    facts = finish(cluster, job, log)
    said = log.read_text()
    # Slurm's order to end the first run may reach a node that is back within a minute, and ends the
    # second run with it
    assert facts["JobState"] == "COMPLETED", said[-3000:]
    assert facts["Restarts"] in ("1", "2"), said[-3000:]
    assert [record["step"] for record in metrics(run_dir)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("number_of_nodes", [1, 2])
def test_bad_input_is_not_requeued(cluster, tmp_path, number_of_nodes):
    job, _ = submit(
        cluster, tmp_path / "run", "data.path=/nowhere.jsonl", number_of_nodes=number_of_nodes
    )
    facts = finish(cluster, job, tmp_path / "job.log")
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("FAILED", "0", "2:0")
    assert "/nowhere.jsonl" in (tmp_path / "job.log").read_text()


def submit_instead(
    cluster, folder, launcher, *header, number_of_nodes=1, script=SCRIPT, **environment
):
    """A batch script with ``launcher`` (bash) in the place of ``python -m megatron_dcpo
    launch``.
    """
    stand_in = folder / "bin" / "python"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/bash\n{launcher}\n")
    stand_in.chmod(0o755)
    environment |= {
        "DCPO_LOGS": str(folder / "logs"),
        "PATH": f"{stand_in.parent}:{os.environ['PATH']}",
    }
    words = [
        "--parsable",
        f"--nodes={number_of_nodes}",
        "--gpus-per-node=1",
        f"--output={folder}/job.log",
        *header,
    ]
    return cluster.call(
        "sbatch", *words, script, "config.yaml", environment=environment, cwd=folder
    ).strip()


WARNED = "trap 'exit {}' USR1; touch started$SLURM_NODEID; while :; do sleep 0.1; done"
ONCE = "[ $SLURM_RESTART_COUNT ] || {{ {}; }}"
# what the launcher does on each of so many nodes, and how the job ends: state, restarts, status
ENDS = {
    "bad_input_after_a_warning": (
        WARNED.format(2),
        1,
        "FAILED 0 2:0",
    ),  # a disk that the last save finds full
    "the_same_on_one_of_two_nodes": (
        WARNED.format("$((SLURM_NODEID ? 2 : 99))"),
        2,
        "FAILED 0 2:0",
    ),
    "warned": (ONCE.format(WARNED.format(99)), 1, "COMPLETED 1 0:0"),
    "no_such_command": ("exit 127", 1, "FAILED 0 127:0"),
    "exception": ("exit 1", 2, "FAILED 0 1:0"),
    "lost_each_time": ("exit 98", 1, "FAILED 1 98:0"),  # DCPO_MAX_CRASHES=2
    "killed_each_time": ("kill -9 $$", 1, "FAILED 1 137:0"),
    "lost_once": (ONCE.format("exit 98"), 1, "COMPLETED 1 0:0"),
}


@pytest.mark.parametrize("what", ENDS)
def test_what_is_requeued(cluster, tmp_path, what):
    launcher, number_of_nodes, ends = ENDS[what]
    log = tmp_path / "job.log"
    job = submit_instead(
        cluster, tmp_path, launcher, number_of_nodes=number_of_nodes, DCPO_MAX_CRASHES="2"
    )
    if "started" in launcher:
        wait_for(lambda: len(list(tmp_path.glob("started*"))) == number_of_nodes, log, 60)
        cluster.call("scancel", "--signal=USR1", "--batch", job)
    facts, said = finish(cluster, job, log, 120), log.read_text()
    assert " ".join((facts["JobState"], facts["Restarts"], facts["ExitCode"])) == ends, said
    assert ("crashed too often" in said) == ends.startswith("FAILED 1")


SERVES = """case "$*" in *--engines*)
    touch serves$SLURM_RESTART_COUNT
    trap '' USR1
    while :; do sleep 0.1; done
esac
"""


def test_training_and_its_servers_on_nodes_of_their_own(cluster, tmp_path):
    """The warning reaches the training alone; servers end with it, in both attempts."""
    log = tmp_path / "job.log"
    beside = SCRIPT.with_name("async.sbatch")
    launcher = SERVES + ONCE.format(WARNED.format(99))
    job = submit_instead(cluster, tmp_path, launcher, number_of_nodes=2, script=beside)
    wait_for(lambda: len([*tmp_path.glob("started*"), *tmp_path.glob("serves")]) == 2, log, 60)
    cluster.call("scancel", "--signal=USR1", "--batch", job)
    facts, said = finish(cluster, job, log, 120), log.read_text()
    ends = " ".join((facts["JobState"], facts["Restarts"], facts["ExitCode"]))
    assert ends == "COMPLETED 1 0:0", said
    assert "ended with status 99 after a warning" in said
    served = sorted(path.name for path in tmp_path.glob("serves*"))
    assert served == ["serves", "serves1"]


def test_job_that_may_not_requeue_itself_is_requeued_by_its_status(cluster, tmp_path):
    """``RequeueExit=99`` in slurm.conf."""
    job = submit_instead(cluster, tmp_path, "[ $SLURM_RESTART_COUNT ] || exit 99", "--no-requeue")
    facts, said = (
        finish(cluster, job, tmp_path / "job.log", 120),
        (tmp_path / "job.log").read_text(),
    )
    assert (facts["JobState"], facts["Restarts"], facts["ExitCode"]) == ("COMPLETED", "1", "0:0"), (
        said
    )
    assert "disabled" in said, "scontrol requeue was refused"


def is_worker(pid):
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return (
        "train" in words
        and "launch" not in words
        and any(word.endswith("megatron_dcpo") for word in words)
    )
