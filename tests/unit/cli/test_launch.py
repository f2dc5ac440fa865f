"""What ``dcpo launch`` adds to torchrun's options and to the ranks' environment."""

import glob
import shutil
from types import SimpleNamespace

import pytest

from megatron_dcpo.cli import launch
from megatron_dcpo.runtime import device

NODES = ["/sys/devices/system/node/node0", "/sys/devices/system/node/node1"]


@pytest.mark.parametrize(
    ("gpu", "nodes", "numactl", "options", "bound"),
    [
        (True, NODES, "/usr/bin/numactl", [], True),
        (False, NODES, "/usr/bin/numactl", [], False),
        (True, NODES[:1], "/usr/bin/numactl", [], False),
        (True, NODES, None, [], False),  # torchrun would fail
        (True, NODES, "/usr/bin/numactl", ["--numa-binding=exclusive"], False),  # as the user says
    ],
)
def test_ranks_stay_beside_their_gpus(monkeypatch, gpu, nodes, numactl, options, bound):
    monkeypatch.setattr(device, "capabilities", lambda: SimpleNamespace(separate_memory=gpu))
    monkeypatch.setattr(glob, "glob", lambda pattern: nodes)
    monkeypatch.setattr(shutil, "which", lambda name: numactl)
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
    import os

    import torch.distributed.run

    seen = {}

    def ranks(parsed):
        seen.update(os.environ, processes=parsed.nproc_per_node)

    monkeypatch.setattr(torch.distributed.run, "run", ranks)
    monkeypatch.setattr(launch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(launch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    assert launch.run(SimpleNamespace(processes="2", arguments=["--", "train", "--config", "x"])) == 0
    assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == (own or "1")
    assert seen["processes"] == "2"
