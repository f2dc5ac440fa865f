"""What every benchmark hands to ``run.py``: our number, the alternative's, the goal of their ratio.

A benchmark is a file here with ``measurements() -> Iterator[Measurement]``; nothing else has to be
registered. Beside it: timing in turns, workers that take one step when told to, and where the data,
peers and scratch space are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DCPO_DATA") or REPOSITORY.parent / "shared" / "data")
# a form of seconds, which shows that a benchmark runs; its numbers say nothing
QUICK = os.environ.get("DCPO_QUICK") == "1"
# another interpreter, for packages that are not to be installed beside ours
PEERS = os.environ.get("DCPO_PEERS") or sys.executable
# this checkout first; what was installed beside it (tools/gpu_check.sh) stays
PATHS = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(PATHS),
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
}


def environment() -> dict[str, str]:
    """For a child: one thread, this checkout, and nothing of a process group that this process may
    be in.
    """
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in os.environ.items() if name not in own} | ENVIRONMENT


@dataclass(frozen=True)
class Measurement:
    """``ours`` and ``other`` in ``unit``; ``goal`` bounds ``ours / other`` from above, or from
    below if ``at_least``.

    ``same``: both computed the same thing. ``reason``: why there is no number, or how "the same" is
    meant. ``bound``: the ratio that what cannot be left out has alone, ``bound_is``, where the goal
    may be out of reach. ``raw``: the single measurements.
    """

    name: str
    ours: float | None
    other: float | None
    unit: str
    other_is: str
    goal: float | None = None
    at_least: bool = False
    same: bool = True
    reason: str = ""
    bound: float | None = None
    bound_is: str = ""
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return None if self.ours is None or not self.other else self.ours / self.other

    @property
    def met(self) -> bool | None:
        """None where nothing can be said: a number is missing, or there is no goal. Never True of
        unequal results.
        """
        if not self.same:
            return False
        if self.ratio is None or self.goal is None:
            return None
        return self.ratio >= self.goal if self.at_least else self.ratio <= self.goal

    def line(self, command: str) -> dict[str, Any]:
        """The JSON line."""
        reason = (
            self.reason
            if self.same or self.ours is None
            else f"the results differ. {self.reason}".strip()
        )
        keys = ("name", "ours", "other", "ratio", "goal", "met", "unit", "other_is")
        values = {key: _rounded(getattr(self, key)) for key in keys}
        if self.goal is not None:
            values["goal_is"] = "at least" if self.at_least else "at most"
        if self.bound is not None:
            values |= {"bound": _rounded(self.bound), "bound_is": self.bound_is}
        return values | {"command": command, "reason": reason, "same": self.same, "raw": self.raw}


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def absent(name: str, unit: str, other_is: str, reason: str, **fields: Any) -> Measurement:
    """Nothing was measured: a peer or a data set is not here."""
    return Measurement(name, None, None, unit, other_is, reason=reason, **fields)


def not_installed(package: str) -> str:
    return (
        f"not installed: pip install {package} (in our environment, or in another one: "
        "DCPO_PEERS=/path/of/its/python)"
    )


def peer_has(module: str) -> bool:
    """Whether the peers' interpreter has it; nothing is imported."""
    if sys.executable == PEERS:
        return importlib.util.find_spec(module) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([PEERS, "-c", code], check=False).returncode == 0


def cpu_seconds() -> float:
    """Processor time of this process with its threads, and of the children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@dataclass
class Turns:
    """One alternative's rounds: wall and processor seconds, and what it returned last."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    result: Any = None

    def take(self, call: Callable[[], Any]) -> None:
        wall, cpu = time.perf_counter(), cpu_seconds()
        self.result = call()
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(cpu_seconds() - cpu)

    @property
    def seconds(self) -> dict[str, list[float]]:
        return {
            "wall_s": [round(x, 6) for x in self.wall],
            "cpu_s": [round(x, 6) for x in self.cpu],
        }


def in_turns(rounds: int, warm_up: int = 1, **alternatives: Callable[[], Any]) -> dict[str, Turns]:
    """A B A B ...: other load on the machine meets all of them. The first ``warm_up`` rounds are
    not counted.
    """
    turns = {name: Turns() for name in alternatives}
    for number in range(warm_up + rounds):
        for name, call in alternatives.items():
            (turns[name] if number >= warm_up else Turns()).take(call)
    return turns


def timed(
    name: str,
    ours: Turns,
    other: Turns,
    other_is: str,
    clock: str = "cpu",
    how: Any = statistics.median,
    **fields: Any,
) -> Measurement:
    """Medians (or minima) of ``clock``: ``cpu`` where the machine is shared, ``wall`` where waiting
    is what counts.
    """
    a, b = (how(getattr(turns, clock)) for turns in (ours, other))
    unit = (
        f"s ({'processor' if clock == 'cpu' else 'wall'} time, {how.__name__} of {len(ours.wall)})"
    )
    return Measurement(
        name, a, b, unit, other_is, raw={"ours": ours.seconds, "other": other.seconds}, **fields
    )


class Stepper:
    """A process that takes one step whenever :meth:`step` says so and waits meanwhile: for
    alternatives that cannot share an interpreter. Its program calls :func:`steps`.
    """

    def __init__(self, python: str, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"step"'):
                return dict(json.loads(line)["step"])
        raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def steps() -> Iterator[Callable[..., None]]:
    """In a stepper's program: yields once per step asked for a function that reports it; keywords
    travel along.
    """
    for _ in sys.stdin:
        begin = time.perf_counter(), cpu_seconds()

        def report(begin: tuple[float, float] = begin, **facts: Any) -> None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            spent = {
                "wall": time.perf_counter() - begin[0],
                "cpu": cpu_seconds() - begin[1],
                "peak_bytes": peak,
            }
            print(json.dumps({"step": spent | facts}), flush=True)

        yield report


def alone(
    name: str, measurements: Callable[[], Iterator[Measurement]], worker: Callable[[Any], None]
) -> None:
    """A benchmark as a program: a rank that :func:`torchrun` started with its options as JSON, or
    all measurements.
    """
    if sys.argv[1:]:
        worker(json.loads(sys.argv[1]))
        return
    for measurement in measurements():
        print(measurement.line(f"python benchmarks/run.py {name}"))


def torchrun(processes: int, script: str, *arguments: str) -> None:
    """``script`` in ``processes`` ranks. Raises RuntimeError with the end of their output."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    done = subprocess.run(
        [*launcher, script, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{script} failed in {processes} ranks:\n{done.stderr[-4000:]}")


def train(
    run_dir: Path, *overrides: str, processes: int = 1, config: str = "dcpo"
) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a training of the quickstart's model."""
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ] * (processes > 1)
    arguments = [
        "-m",
        "megatron_dcpo",
        "train",
        "--config",
        f"examples/quickstart/{config}.yaml",
        f"run_dir={run_dir}",
    ]
    command = [sys.executable, *launcher, *arguments, "logging.to=[]", *overrides]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _hand_over(script: Path) -> None:
    """In a process of its own: every measurement of ``script`` as a line, as soon as it is made."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the benchmark prints is not a result
    for measurement in module.measurements():
        print(json.dumps(asdict(measurement)), file=out, flush=True)


def main(arguments: Sequence[str]) -> None:
    _hand_over(Path(arguments[0]).resolve())


if __name__ == "__main__":
    main(sys.argv[1:])
