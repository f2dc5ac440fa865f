"""The ten runs that a GPU lent for half an hour is for, most telling first: ``tools/gpu_check.sh
runs`` and ``dry``.

    gpu_runs.py OUT [--pretend] [--only 1,3] [--seconds 1680]

Each has a time limit, a log ``OUT/NN_name.log`` and a line in ``OUT/summary.json``. What needs a
package that is absent is skipped by its name, or does without where it can. ``--pretend``: here,
without a GPU: every command is looked up, not run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
Installed = Callable[[str], bool]
ENGINE, LAYERS = "vllm", "transformer_engine"
NAMES = {ENGINE: "vLLM", LAYERS: "Transformer Engine"}
DCPO = (sys.executable, "-m", "megatron_dcpo")


@dataclass(frozen=True)
class Run:
    """``commands``: one after the other. ``pretended``: what is run in their place without a GPU.
    ``after``: a run whose result it needs.
    """

    name: str
    limit: int  # seconds
    commands: tuple[tuple[str, ...], ...]
    pretended: tuple[tuple[str, ...], ...]
    needs: tuple[str, ...] = ()
    after: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def suite(
    name: str,
    limit: int,
    file: str,
    select: str,
    *needs: str,
    first: Sequence[str] = (),
    **environment: str,
) -> Run:
    """Return the run of the tests of ``tests/gpu`` that ``select`` names; pretended, they are only
    collected.
    """
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-rs",
        "-p",
        "no:cacheprovider",
        f"tests/gpu/{file}",
        "-k",
        select,
    )
    before = (tuple(first),) if first else ()
    return Run(
        name,
        limit,
        (*before, command),
        (*before, (*command, "--collect-only")),
        needs,
        environment=environment,
    )


def training(out: Path, installed: Installed) -> list[str]:
    """Return the options of a training in bf16 as users run it, with what is installed."""
    return [
        "model.params_dtype=bf16",
        f"model.transformer_impl={LAYERS if installed(LAYERS) else 'local'}",
        f"rollout.engine={ENGINE if installed(ENGINE) else 'transformers'}",
        "parallel.use_distributed_optimizer=true",
        "parallel.sequence_packing=true",
        "training.offload_optimizer_during_rollout=true",
        "objective.tis_level=token",
        f"run_dir={out}",
    ]


def runs(out: Path, installed: Installed) -> list[Run]:
    """Return the ten, in their order. The limits add up to 28 minutes."""
    quickstart = [*DCPO, "train", "--config", "examples/quickstart/dcpo.yaml"]
    short = (
        *quickstart,
        *training(out / "quickstart", installed),
        "training.save_interval=1",
    )
    model = out / "qwen3_4b"
    write = (sys.executable, "benchmarks/random_model.py", "Qwen/Qwen3-4B", str(model))
    large = (
        *quickstart,
        *training(out / "large", installed),
        f"model.path={model}",
        "rollout.gpu_memory_utilization=0.8",
        "rollout.max_response_length=512",
        "data.prompts_per_step=16",
        # by the plan 79 GB; without these two 148
        "training.max_tokens_per_micro_batch=4096",
        "parallel.recompute_granularity=full",
        "training.save_interval=0",
        "training.export_hf=false",
    )
    traced = (
        *(option for option in large if not option.startswith("run_dir")),
        f"run_dir={out / 'traced'}",
    )
    dry = ("--dry-run",)
    state, engine = "test_state_on_gpu.py", "test_engine_on_gpu.py"
    pretended_large = (
        *large,
        f"model.path={REPOSITORY / 'examples/quickstart/policy'}",
        "data.prompts_per_step=8",
    )
    dry_large = (
        (*write, "--pretend"),
        (*pretended_large, "rollout.max_response_length=32", *dry),
    )
    resume = (*short, "training.steps=5", "--resume", "auto")
    mismatch, copies = (
        (sys.executable, f"benchmarks/{name}.py")
        for name in ("mismatch_gpu", "host_copies")
    )
    debug = {"NVTE_DEBUG": "1", "NVTE_DEBUG_LEVEL": "2"}
    # for the log: the other machine has other releases than the pins, which ends it with 1
    doctor = ("sh", "-c", f"{sys.executable} -m megatron_dcpo doctor || true")
    return [
        suite(
            "packed_is_padded", 240, state, "packed_is_padded", first=doctor, **debug
        ),
        suite("three_sleeps", 200, engine, "three_sleeps", ENGINE),
        suite("closed_while_kv_sleeps", 120, engine, "closed_while_kv_sleeps", ENGINE),
        suite(
            "resumption_and_offloading", 200, state, "resumption or leaves_the_device"
        ),
        Run(
            "quickstart", 200, ((*short, "training.steps=3"), resume), ((*short, *dry),)
        ),
        suite("memory_is_what", 120, state, "memory_is_what"),
        Run("large", 240, (write, (*large, "training.steps=2")), dry_large),
        Run(
            "mismatch", 200, (mismatch,), ((*mismatch, "--pretend"),), (ENGINE, LAYERS)
        ),
        Run(
            "traced",
            120,
            ((*traced, "training.steps=2", "training.profile_steps=[2]"),),
            (
                (
                    *pretended_large,
                    "rollout.max_response_length=32",
                    "training.profile_steps=[2]",
                    *dry,
                ),
            ),
            after="large",
        ),
        Run("host_copies", 40, (copies,), ((*copies, "--pretend"),)),
    ]


def carry_out(
    run: Run, number: int, out: Path, pretend: bool, limit: float
) -> dict[str, object]:
    """Run its commands until one fails or the time is over; return its line of the summary."""
    log, began, status = out / f"{number:02}_{run.name}.log", time.monotonic(), "passed"
    environment = (
        os.environ | run.environment | {"PYTHONPATH": os.pathsep.join(_paths())}
    )
    with log.open("wb") as file:
        for command in run.pretended if pretend else run.commands:
            file.write(f"$ {' '.join(command)}\n".encode())
            file.flush()
            left = limit - (time.monotonic() - began)
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                ended = process.wait(timeout=max(left, 0.1))
            except subprocess.TimeoutExpired:
                status = f"over its {limit:.0f} s"
            else:
                status = "passed" if ended == 0 else f"failed: status {ended}"
            _end(process)
            if status != "passed":
                break
    return {
        "run": number,
        "name": run.name,
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "log": log.name,
    }


def _paths() -> list[str]:
    """Return this checkout, and what stands in the environment besides: packages that were
    installed beside torch.
    """
    return [
        str(REPOSITORY),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a command of its own session has left: ranks hold the memory that the next run
    needs.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main(installed: Installed = lambda name: find_spec(name) is not None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("--only", default="", help="numbers of runs, comma separated")
    parser.add_argument("--seconds", type=float, default=1680, help="for all of them")
    args = parser.parse_args()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    chosen = {int(number) for number in args.only.split(",") if number}
    deadline, lines, done = time.monotonic() + args.seconds, [], {}
    for number, run in enumerate(runs(out, installed), 1):
        if chosen and number not in chosen:
            continue
        lacking = [
            NAMES[name] for name in run.needs if not (installed(name) or args.pretend)
        ]
        left = deadline - time.monotonic()
        line: dict[str, object] = {
            "run": number,
            "name": run.name,
            "seconds": 0.0,
            "log": "",
        }
        if lacking:
            line["status"] = f"skipped: {' and '.join(lacking)} not installed"
        elif run.after and done.get(run.after, "passed") != "passed":
            line["status"] = f"skipped: {run.after} did not pass"
        elif left < 5:
            line["status"] = "skipped: no time left"
        else:
            line = carry_out(run, number, out, args.pretend, min(run.limit, left))
        done[run.name] = str(line["status"])
        lines.append(line)
        print(
            f"{number:2} {run.name:26} {line['seconds']:6} s  {line['status']}",
            flush=True,
        )
        (out / "summary.json").write_text(
            "[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n"
        )
    return (
        0
        if all(
            status == "passed" or status.startswith("skipped")
            for status in done.values()
        )
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
