"""Training over two nodes; then a rank, a launcher, a node and the link are taken away, on each
node in turn.

The job must end by itself within LIMIT seconds with a line that names what is gone, and a resumed
run must not have lost a step that a checkpoint had. ``make test-multinode`` runs this; the ordinary
suite skips it.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_dcpo.errors import EXIT_PEER_LOST
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, metrics
from tests.multinode import nodes

if os.environ.get("DCPO_TEST_MULTINODE") != "1":
    pytest.skip(
        "makes two nodes of network namespaces: make test-multinode", allow_module_level=True
    )

LIMIT = 60  # docs/checkpoints.md: 30 s until a rank counts as lost, 15 s until a launcher leaves
STEPS = 400


@pytest.fixture
def pair(tmp_path):
    problem = nodes.why_not()
    assert not problem, problem  # asked for by name: not being able to is a failure
    with nodes.two_nodes(tmp_path) as made:
        yield made


def start(pair, run_dir, steps, port):
    """The launchers of both nodes, in the background. Their output goes to RUN_DIR.n1 and
    RUN_DIR.n2.
    """
    started = []
    for node in pair:
        launch = [
            "--nnodes",
            2,
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"n1:{port}",
            "--rdzv-id",
            port,
            "--rdzv-conf",
            "join_timeout=120",
            "--local-addr",
            node.name,
        ]
        train = [
            "train",
            "--resume",
            "auto",
            "--config",
            QUICKSTART / "dcpo.yaml",
            f"run_dir={run_dir}",
            *SMALL,
            "training.save_interval=2",
            f"training.steps={steps}",
        ]
        words = [sys.executable, "-m", "megatron_dcpo", "launch", 1, *launch, "--", *train]
        with output(run_dir, node).open("w") as log:
            environment = os.environ | {"GLOO_SOCKET_IFNAME": nodes.LINK, "OMP_NUM_THREADS": "1"}
            started.append(
                subprocess.Popen(
                    node.command(*words), cwd=REPOSITORY, stdout=log, stderr=log, env=environment
                )
            )
    return started


def output(run_dir, node):
    return run_dir.with_suffix(f".{node.name}")


def processes(node):
    """``(launcher, worker)`` of a node."""
    found = {}
    for pid in node.processes():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if any(word.endswith("megatron_dcpo") for word in words[:4]):
            found["launcher" if "launch" in words else "worker"] = pid
    return found["launcher"], found["worker"]


def wait_until(condition, started, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert all(process.poll() is None for process in started), "ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def last_saved(run_dir):
    return int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.mark.parametrize("on", [0, 1], ids=["first_node", "second_node"])
@pytest.mark.parametrize("what", ["rank", "launcher", "node", "link"])
def test_the_job_ends_in_time_says_why_and_resumes(pair, tmp_path, what, on):
    run_dir = tmp_path / "run"
    started = start(pair, run_dir, STEPS, 29_500)
    wait_until(lambda: "step 5/" in output(run_dir, pair[0]).read_text(), started, 300)
    launcher, worker = processes(pair[on])
    begin = time.monotonic()
    if what == "node":
        pair[on].kill()
    elif what == "link":
        pair[on].cut()
    else:
        os.kill(worker if what == "rank" else launcher, signal.SIGKILL)
    try:
        statuses = [process.wait(max(0.0, begin + LIMIT - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        said = "".join(output(run_dir, node).read_text()[-2000:] for node in pair)
        pytest.fail(f"still running {LIMIT} s after the {what} was taken away: {said}")
    print(
        f"{what} on {pair[on].name}: ended after {time.monotonic() - begin:.1f} s with {statuses}"
    )
    assert not any(node.processes() for node in pair), "orphans"
    survivors = [0, 1] if what == "link" else [1 - on]
    for index in survivors:
        said = output(run_dir, pair[index]).read_text()
        assert statuses[index] == EXIT_PEER_LOST, said[-3000:]
        line = next(
            (line for line in said.splitlines() if "dcpo: rank" in line and " ends: " in line), ""
        )
        lost_rank = "the job's store at" in line or f"lost rank {1 - index} " in line
        assert lost_rank, said[-3000:]

    saved = last_saved(run_dir)
    before = {record["step"]: record for record in metrics(run_dir)}
    assert saved >= 4
    if what == "link":
        subprocess.run(
            ["ip", "-n", pair[on].namespace, "link", "set", nodes.LINK, "up"], check=True
        )
    steps = saved + 2
    again = start(pair, run_dir, steps, 29_501)
    assert [process.wait(300) for process in again] == [0, 0], output(run_dir, pair[0]).read_text()[
        -3000:
    ]
    after = {record["step"]: record for record in metrics(run_dir)}
    assert sorted(after) == list(range(1, steps + 1))
    assert all(after[step] == before[step] for step in range(1, saved + 1)), (
        "a saved step was done again"
    )
