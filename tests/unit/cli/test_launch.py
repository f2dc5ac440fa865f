"""What ``dcpo launch`` adds to torchrun's options and to the ranks' environment."""

import glob
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron_dcpo.cli import launch
from megatron_dcpo.runtime import device
from tests.helpers.paths import QUICKSTART, REPOSITORY


@pytest.mark.parametrize(
    ("gpu", "cpulists", "numactl", "options", "bound"),
    [
        (True, ["0-1", "2-3"], "/usr/bin/numactl", [], True),
        (False, ["0-1", "2-3"], "/usr/bin/numactl", [], False),
        (True, ["0-3"], "/usr/bin/numactl", [], False),
        (True, ["0-1", "2-3"], None, [], False),  # torchrun would fail
        (
            True,
            ["0-1", "2-3"],
            "/usr/bin/numactl",
            ["--numa-binding=exclusive"],
            False,
        ),  # as the user says
        (True, ["0,2,4-6", "1,3,7"], "/usr/bin/numactl", [], True),
        (True, ["0-3", "4-7"], "/usr/bin/numactl", [], False),  # not of this job
        (True, ["0-3", ""], "/usr/bin/numactl", [], False),  # of memory alone
    ],
)
def test_ranks_stay_beside_their_gpus(
    monkeypatch, tmp_path, gpu, cpulists, numactl, options, bound
):
    nodes = []
    for number, cpus in enumerate(cpulists):
        node = tmp_path / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(cpus + "\n")
        nodes.append(str(node))
    monkeypatch.setattr(device, "capabilities", lambda: SimpleNamespace(separate_memory=gpu))
    monkeypatch.setattr(glob, "glob", lambda pattern: nodes)
    monkeypatch.setattr(shutil, "which", lambda name: numactl)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    assert launch._numa_binding(options) == (["--numa-binding", "node"] if bound else [])


@pytest.mark.parametrize("own", [None, "8"])
def test_what_megatrons_overlap_needs(monkeypatch, tmp_path, own):
    """Ranks find CUDA_DEVICE_MAX_CONNECTIONS=1, unless the user has set it."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.setenv("DCPO_LAUNCHER_PID", "")
    if own:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", own)
    else:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    import torch.distributed.run

    seen = {}

    def ranks(parsed):
        seen.update(os.environ, processes=parsed.nproc_per_node)

    monkeypatch.setattr(torch.distributed.run, "run", ranks)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    assert (
        launch.run(SimpleNamespace(processes="2", arguments=["--", "train", "--config", "x"])) == 0
    )
    assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == (own or "1")
    assert seen["processes"] == "2"


def failed(tmp_path, rank, exitcode, said=None, at=0):
    file = tmp_path / f"error{rank}.json"
    if said:
        file.write_text(json.dumps({"message": said, "timestamp": at}))
    return ProcessFailure(rank, 100 + rank, exitcode, str(file))


def test_the_rank_that_failed_first_is_named(tmp_path):
    """Not those that were ended because of it, nor those that found it gone."""
    failures = {
        0: failed(tmp_path, 0, -15),
        1: failed(tmp_path, 1, 98),
        2: failed(tmp_path, 2, 2, "later", at=7),
        3: failed(tmp_path, 3, 2, "data.path=x: no such file", at=5),
    }
    expected = "rank 3 (pid 103) ended with status 2: data.path=x: no such file"
    assert launch._describe(*launch.first_failure(failures)) == expected
    killed = {rank: failures[rank] for rank in (0, 1)} | {2: failed(tmp_path, 9, -9)}
    assert (
        launch._describe(*launch.first_failure(killed)) == "rank 2 (pid 109) was killed by SIGKILL"
    )


@pytest.mark.slow
def test_the_last_line_of_a_failed_launch_is_the_error(tmp_path):
    command = [
        "launch",
        "2",
        "--",
        "train",
        "--config",
        str(QUICKSTART / "dcpo.yaml"),
        f"run_dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "megatron_dcpo", *command, "parallel.tensor_model_parallel_size=3"],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dcpo launch: rank ")
    assert "ended with status 2: parallel.tensor_model_parallel_size=3 does not divide" in last
    assert "SIGTERM" not in last
