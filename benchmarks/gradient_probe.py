"""What the gradient probe costs: probed against unprobed steps of one training run.

    python benchmarks/gradient_probe.py [RUN/metrics.jsonl]       # without a file: trains the quickstart for 40 steps

Prints the share of step time that the probe adds at the default interval, and the ratio of a probed step to others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measurement import Measurement, train

from megatron_dcpo.config import TrainingConfig

PHASES = ("rollout", "judge", "train", "reshard")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = (
            [json.loads(x) for x in Path(sys.argv[1]).read_text().splitlines()] if sys.argv[1:] else probed_run(folder)
        )
    probed, plain = split(rows)
    ratio, interval = np.median(probed) / np.median(plain), TrainingConfig().gradient_probe_interval
    print(f"{len(probed)} probed and {len(plain)} other steps, {np.median(plain):.3f} s each without the probe")
    print(f"a probed step takes {ratio:.2f} times as long")
    print(
        f"at the default interval of {interval} steps the probe adds {100 * (ratio - 1) / interval:.1f} % of step time"
    )


def split(rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds of probed and of other steps; the first two warm up."""
    seconds = [(sum(row[f"time/{phase}"] for phase in PHASES), row["grad_norm/reasoning"]) for row in rows[2:]]
    return [s for s, norm in seconds if norm is not None], [s for s, norm in seconds if norm is None]


def probed_run(folder: str) -> list[dict[str, Any]]:
    return train(Path(folder, "run"), "training.steps=40", "training.gradient_probe_interval=4")


def measurements() -> Iterator[Measurement]:
    """Probed and other steps of one run stand in turns; the probe's are every fourth."""
    with tempfile.TemporaryDirectory() as folder:
        probed, plain = split(probed_run(folder))
    interval = TrainingConfig().gradient_probe_interval
    ours = float(np.median(plain) * (interval - 1) + np.median(probed)) / interval
    unit = f"s per step (wall time, medians) where one in {interval} is probed"
    raw = {"probed": probed, "plain": plain}
    yield Measurement(
        "gradient_probe", ours, float(np.median(plain)), unit, "steps without a probe", goal=1.03, raw=raw
    )


if __name__ == "__main__":
    main()
