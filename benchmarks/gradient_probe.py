"""What the gradient probe costs: probed against unprobed steps of one training run, in turns.

    python benchmarks/run.py gradient_probe

The quickstart with DCPO; whole steps: rollout, judging, update, weight transfer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measurement import Measurement, cpu_seconds

STEPS = 60


def measurements() -> Iterator[Measurement]:
    import policies

    from megatron_dcpo.config import TrainingConfig

    seconds: tuple[list[float], list[float]] = ([], [])  # of plain and of probed steps
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"run_dir={folder}/run",
            f"training.steps={STEPS}",
            "training.gradient_probe_interval=2",
        ]
        data = Path(policies.QUICKSTART, "data", "train.jsonl")
        options += [f"model.path={policies.QUICKSTART / 'policy'}", f"data.path={data}"]
        with policies.training_run(options, "dcpo.yaml") as run:
            for step in range(1, STEPS + 1):
                before = cpu_seconds()
                policies.training_step(run, step)
                if step > 4:
                    seconds[step % 2 == 0].append(cpu_seconds() - before)
    plain, probed = (float(np.median(values)) for values in seconds)
    interval = TrainingConfig().gradient_probe_interval
    ours = (plain * (interval - 1) + probed) / interval
    unit = f"s per step (processor time, medians of {len(seconds[1])}) where one in {interval} is probed"
    reason = f"a probed step takes {probed / plain:.2f} times as long"
    raw = {"probed": seconds[1], "plain": seconds[0]}
    yield Measurement(
        "gradient_probe", ours, plain, unit, "steps without a probe", 1.03, reason=reason, raw=raw
    )


if __name__ == "__main__":
    for measurement in measurements():
        print(measurement.line("python benchmarks/run.py gradient_probe"))
