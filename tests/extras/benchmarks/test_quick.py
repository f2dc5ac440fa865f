"""Every benchmark runs, in a form of seconds: both sides compute the same, and there is a
number.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.run import FOLDER, benchmarks
from tests.helpers.paths import REPOSITORY

NAMES = list(benchmarks(FOLDER))
# tens of seconds even so: other processes, sandboxes, paces
LONG = (
    "async_step",
    "checkpoint",
    "critical_path",
    "long_tails",
    "mismatch",
    "plan_memory",
    "reshard",
    "skipped_tokens",
    "step_megatron",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LONG else name for name in NAMES]
)
def test_a_benchmark_runs(name: str) -> None:
    from benchmarks.measurement import environment

    done = subprocess.run(
        [sys.executable, "benchmarks/measurement.py", f"benchmarks/{name}.py"],
        cwd=REPOSITORY,
        env=environment() | {"DCPO_QUICK": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines
    for line in lines:
        assert line["ours"] is not None or line["reason"], line["name"]
        assert line["same"], line
