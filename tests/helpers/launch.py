"""Start a worker script under torchrun on this machine and read the JSON it leaves per rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.paths import REPOSITORY


def torchrun(script: Path, processes: int, out: Path, options: dict[str, Any], timeout: float = 300) -> list[Any]:
    """Run ``script`` with ``options`` (JSON on argv) in ``processes`` ranks; returns each rank's result in rank order."""
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    arguments = [str(script), json.dumps(options | {"out": str(out)})]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, f"{script.name} {options} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)]


def without_launcher(script: Path, processes: int, out: Path, options: dict[str, Any]) -> list[int]:
    """The same with no one who ends the other ranks when one dies; returns the exit statuses."""
    out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    fixed |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    command = [sys.executable, str(script), json.dumps(options | {"out": str(out)})]
    ranks = [
        subprocess.Popen(command, env=os.environ | fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    return [rank.wait(timeout=300) for rank in ranks]
