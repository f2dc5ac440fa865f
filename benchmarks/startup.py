"""Start-up: a training's first step against the imports it cannot do without, light verbs against
argparse and yaml.

    python benchmarks/run.py startup

Processor time of the process from its start; the judge's worker processes are other ones.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measurement import ENVIRONMENT, REPOSITORY, Measurement

QUICKSTART = "examples/quickstart"
STARTED = "float(open('/proc/self/stat').read().rpartition(')')[2].split()[19]) / os.sysconf('SC_CLK_TCK')"
NOW = f"[time.process_time(), time.clock_gettime(time.CLOCK_BOOTTIME) - {STARTED}]"
CLOCK = f"import json, os, time; print(json.dumps({NOW}), flush=True)"
IMPORTS = "import torch, megatron.core, transformers"
LIGHT = "import argparse, yaml"
# what reading a configuration imports even so: pydantic loads most of itself with these names
SCHEMA = "import argparse, yaml, numpy, omegaconf; from pydantic import BaseModel, TypeAdapter; import pydantic.dataclasses"
FIRST_STEP = f"""
from megatron_dcpo.training import recorder
def log(*_):
    {CLOCK}
    os._exit(0)
recorder.Recorder.log = log
"""
# an installed package has its bytecode, as the libraries have; the first round writes that of a
# checkout
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
DCPO = "import sys\nfrom megatron_dcpo.cli import main\n"
VERBS = {
    "help": ["--help"],
    "train --help": ["train", "--help"],
    "launch --help": ["launch", "--help"],
    "plan": ["plan", "--config", f"{QUICKSTART}/dcpo.yaml", "--gpus", "8"],
    "train, no such file": ["train", "--config", "nowhere.yaml"],
    "train, refused option": ["train", "--config", f"{QUICKSTART}/dcpo.yaml", "objective.lam=3"],
}
NEEDED = {"plan": f"{SCHEMA}; import rich.console, rich.table", "train, refused option": SCHEMA}


def seconds(code: str, arguments: list[str]) -> tuple[float, float]:
    """Processor and wall time of ``code`` from the start of its process to where it prints
    :data:`CLOCK`.
    """
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        env=os.environ | ENVIRONMENT | COMPILED,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if not found:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    cpu, wall = json.loads(found[-1])
    return cpu, wall


def compared(
    name: str, goal: float, ours: tuple[str, list[str]], other: str, rounds: int, needed: str = ""
) -> Iterator[Measurement]:
    """In turns; the first round fills the page cache. ``needed``: the imports that ours cannot do
    without, as a bound of the ratio and as another alternative.
    """
    codes = [other, *([needed] if needed else [])]
    rows = [
        (seconds(*ours), *(seconds(f"{code}\n{CLOCK}", []) for code in codes))
        for _ in range(rounds + 1)
    ][1:]
    cpu = [min(row[i][0] for row in rows) for i in range(len(codes) + 1)]
    unit = f"s (processor time, min of {rounds})"
    for place, code in enumerate(codes, 1):
        sides = {"ours (cpu, wall)": 0, "other (cpu, wall)": place}
        raw = {side: [list(row[i]) for row in rows] for side, i in sides.items()}
        wall = statistics.median(row[0][1] for row in rows) / statistics.median(
            row[place][1] for row in rows
        )
        facts: dict[str, Any] = {
            "goal": goal,
            "reason": f"wall time, medians: ratio {wall:.2f}",
            "raw": raw,
        }
        if place == 2:
            name, facts["goal"] = f"{name}, against its libraries", 1.3
        elif needed:
            facts |= {"bound": cpu[2] / cpu[1], "bound_is": "the imports of its libraries alone"}
        yield Measurement(
            f"startup/{name}", cpu[0], cpu[place], unit, f'python -c "{code}"', **facts
        )


def measurements() -> Iterator[Measurement]:
    verb = f"{DCPO}try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n{CLOCK}"
    for name, arguments in VERBS.items():
        yield from compared(name, 3.0, (verb, arguments), LIGHT, 9, NEEDED.get(name, ""))
    with tempfile.TemporaryDirectory() as scratch:
        small = [
            "data.prompts_per_step=4",
            "rollout.group_size=4",
            "training.steps=2",
            "logging.to=[]",
        ]
        training = [
            "train",
            "--config",
            f"{QUICKSTART}/dcpo.yaml",
            f"run_dir={Path(scratch, 'run')}",
            *small,
        ]
        yield from compared(
            "first step", 1.3, (FIRST_STEP + DCPO + "main(sys.argv[1:])", training), IMPORTS, 5
        )


if __name__ == "__main__":
    for measurement in measurements():
        print(measurement.line("python benchmarks/run.py startup"))
