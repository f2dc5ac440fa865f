"""``dcpo`` as a user runs it, on the quickstart's policy, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers import launch, warm
from tests.helpers.paths import FIXTURES, QUICKSTART, REPOSITORY

# every 13th problem of the quickstart: to read all of them takes longer than two small steps
FEW_PROBLEMS = f"data.path={FIXTURES / 'problems.jsonl'}"
SIZES = [
    "data.prompts_per_step=8",
    "rollout.group_size=4",
    "training.micro_batch_size=16",
    "logging.to=[]",
]
SMALL = [*SIZES, FEW_PROBLEMS]


def judged_twice(out: Path, *asked: object) -> list[list[str]]:
    """Evaluate the quickstart's policy and judge its samples again; the lines of both files."""
    sampled = ("--model", QUICKSTART / "policy", "--template", "raw", "--repeats", 1)
    again = ("--samples", out / "one" / "samples.jsonl", "--rejudge")
    files = []
    for source, name in (((*sampled, "--max-tokens", 8, *asked), "one"), (again, "two")):
        done = run("evaluate", *source, "--out", out / name, "--resamples", 0)
        assert done.returncode == 0, done.stderr[-3000:]
        files.append((out / name / "samples.jsonl").read_text().splitlines())
    return files


def command(*arguments: object, processes: int = 1) -> list[str]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(processes),
        ]
    return [*launcher, "-m", "megatron_dcpo", *map(str, arguments)]


def run(
    *arguments: object,
    processes: int = 1,
    torchrun: bool = False,
    timeout: float = 300,
    cwd: Path = REPOSITORY,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run ``dcpo`` in forks of the warm process, several as ranks of one job; with ``torchrun``
    under the launcher, whose exit status is its own.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    if not torchrun:
        ranks = launch.ranks(processes) if processes > 1 else [{}]
        return warm.run(
            "megatron_dcpo",
            [*map(str, arguments)],
            [environment | rank for rank in ranks],
            timeout,
            cwd=cwd,
        )
    return subprocess.run(
        command(*arguments, processes=processes),
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=timeout,
    )


def train(
    run_dir: Path, *overrides: str, method: str = "dcpo", processes: int = 1, torchrun: bool = False
) -> list[dict[str, Any]]:
    arguments = (
        "train",
        "--config",
        QUICKSTART / f"{method}.yaml",
        f"run_dir={run_dir}",
        *SMALL,
        *overrides,
    )
    done = run(*arguments, processes=processes, torchrun=torchrun)
    assert done.returncode == 0, done.stderr[-3000:]
    return metrics(run_dir)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def without_clocks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics that a repeated run repeats."""
    return [
        {k: v for k, v in record.items() if not k.startswith(("time/", "tokens/s", "memory/"))}
        for record in records
    ]
