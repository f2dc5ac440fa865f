"""Start a worker script under torchrun on this machine and read the JSON it leaves per rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def torchrun(
    script: Path, processes: int, out: Path, options: dict[str, Any], timeout: int = 300
) -> list[dict[str, Any]]:
    """Run ``script`` with ``options`` (JSON on argv) in ``processes`` ranks; returns each rank's result in rank order."""
    out.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    arguments = [str(script), json.dumps(options | {"out": str(out)})]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, f"{script.name} {options} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(processes)]
