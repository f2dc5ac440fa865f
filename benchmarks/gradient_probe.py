"""What the gradient probe costs: probed against unprobed steps of one training run.

    python benchmarks/gradient_probe.py [RUN/metrics.jsonl]       # without a file: trains the quickstart for 40 steps

Prints the share of step time that the probe adds at the default interval, and the ratio of a probed step to others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from megatron_dcpo.config import TrainingConfig

REPOSITORY = Path(__file__).resolve().parents[1]
PHASES = ("rollout", "judge", "train", "reshard")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else train(Path(folder))
        rows = [json.loads(line) for line in path.read_text().splitlines()][2:]  # the first steps warm up
    seconds = np.array([sum(row[f"time/{phase}"] for phase in PHASES) for row in rows])
    probed = np.array([row["grad_norm/reasoning"] is not None for row in rows])
    plain, ratio = np.median(seconds[~probed]), np.median(seconds[probed]) / np.median(seconds[~probed])
    interval = TrainingConfig().gradient_probe_interval
    print(f"{probed.sum()} probed and {(~probed).sum()} other steps, {plain:.3f} s each without the probe")
    print(f"a probed step takes {ratio:.2f} times as long")
    print(
        f"at the default interval of {interval} steps the probe adds {100 * (ratio - 1) / interval:.1f} % of step time"
    )


def train(folder: Path) -> Path:
    config = REPOSITORY / "examples" / "quickstart" / "dcpo.yaml"
    command = [sys.executable, "-m", "megatron_dcpo", "train", "--config", str(config), f"run_dir={folder}/run"]
    command += ["training.steps=40", "training.gradient_probe_interval=4", "logging.tensorboard=false"]
    subprocess.run(command, check=True, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    return folder / "run" / "metrics.jsonl"


if __name__ == "__main__":
    main()
