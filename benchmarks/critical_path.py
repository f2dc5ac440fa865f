"""Which share of a training step is neither generation, training nor weight transfer, with the real
judges.

    python benchmarks/critical_path.py

The quickstart (48 x 8 responses, the math verifier), and a tiny policy that writes 24 x 8 programs
(the sandbox). Each run takes its steps in turns with one whose judge costs nothing: it repeats the
judgements of the first, so that both generate and train on the same. Of a step, what counts is the
time outside the three phases, and by how much the rollout is longer than beside the judge that
costs nothing. Medians of the wall time.

A tiny policy writes 192 programs in a tenth of the time that two cores need to run them, so that
``programs`` has no goal: however the judges overlap, they go on when the rollout is over. In
``programs, paced`` policy and judge are the same, but each response is handed over when a slower
engine on a device of its own would do it: after a time drawn from a log-normal distribution (median
a quarter of the longest, PACE seconds).
"""

from __future__ import annotations

import json
import math
import pickle
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1]))
from measurement import QUICK, REPOSITORY, Measurement, Stepper, steps

STEPS, WARM_UP = (2, 1) if QUICK else (8, 2)
PACE = 1.0 if QUICK else 8.0
GOAL = 0.05
PHASES = ("rollout", "train", "reshard")
CODE = (
    "judging.verifier=code",
    "data.max_prompt_length=64",
    "data.prompts_per_step=24",
    "rollout.max_response_length=80",
)


def main() -> None:
    for measurement in measurements():
        print(
            f"{measurement.name}: {100 * (measurement.ratio or 0):.1f} % of a step; ms: "
            f"{measurement.raw}"
        )


def measurements() -> Iterator[Measurement]:
    with tempfile.TemporaryDirectory() as directory:
        from tests.helpers.coder import make_coder

        policy, data = make_coder(Path(directory))
        programs = (f"model.path={policy}", f"data.path={data}", *CODE)
        for name, overrides, pace, goal in (
            ("math", (), 0.0, GOAL),
            ("programs", programs, 0.0, None),
            ("programs, paced", programs, PACE, GOAL),
        ):
            yield replace(_measure(name, Path(directory, name), overrides, pace), goal=goal)


def _measure(name: str, directory: Path, overrides: tuple[str, ...], pace: float) -> Measurement:
    directory.mkdir()
    rows: dict[str, list[dict[str, Any]]] = {"real": [], "free": []}
    workers = {
        kind: Stepper(
            sys.executable,
            __file__,
            kind,
            str(directory),
            str(pace),
            f"training.steps={STEPS}",
            *overrides,
        )
        for kind in rows
    }
    with workers["real"] as real, workers["free"] as free:
        for _ in range(STEPS):
            rows["real"].append(real.step())
            rows["free"].append(free.step())
    same = [row["trained"] for row in rows["real"]] == [row["trained"] for row in rows["free"]]
    for row in (*rows["real"], *rows["free"]):
        row["outside"] = row["whole"] - sum(row[phase] for phase in PHASES)
    medians = {
        kind: {
            key: statistics.median(row[key] for row in rows[kind][WARM_UP:])
            for key in ("whole", "outside", *PHASES)
        }
        for kind in rows
    }
    longer = max(0.0, medians["real"]["rollout"] - medians["free"]["rollout"])
    return Measurement(
        f"critical path, {name}",
        medians["real"]["outside"] + longer,
        medians["real"]["whole"],
        f"s (wall time, median of {STEPS - WARM_UP})",
        "a whole step",
        same=same,
        raw={
            kind: {key: round(1000 * value, 2) for key, value in medians[kind].items()}
            for kind in rows
        },
    )


def _paced(stream: Any, seconds: float) -> Any:
    """``Engine.stream`` whose responses are finished at times of their own, whatever they took."""

    def paced(samples: Any, sampling: Any, step: int = 0, **_: Any) -> Iterator[list[Any]]:
        began, due = time.perf_counter(), []
        for responses in stream(samples, sampling, step):
            for response in responses:
                draw = random.Random(f"{response.prompt_id}/{response.sample_index}").gauss(0, 0.7)
                due.append((min(1.0, 0.25 * math.exp(draw)) * seconds, len(due), response))
        for after, _, response in sorted(due):
            time.sleep(max(0.0, began + after - time.perf_counter()))
            yield [response]

    return paced


def _train(kind: str, directory: Path, pace: float, overrides: list[str]) -> None:
    """A training that takes a step when told to. ``real`` writes its judgements, ``free`` reads
    them.
    """
    from megatron_dcpo.config import load_config
    from megatron_dcpo.training.loop import train_step
    from megatron_dcpo.training.run import build

    notes = directory / "judgements"
    known: dict[Any, Any] = {}
    config = load_config(
        REPOSITORY / "examples/quickstart/dcpo.yaml",
        [
            f"model.path={REPOSITORY / 'examples/quickstart/policy'}",
            f"data.path={REPOSITORY / 'examples/quickstart/data/train.jsonl'}",
            f"run_dir={directory / kind}",
            "logging.to=[]",
            "logging.samples_interval=0",
            "training.save_interval=0",
            *overrides,
        ],
    )
    with build(config) as run, run.recorder.from_step(1):
        sampler = run.rollouts.sampler
        judge_really = sampler.judge

        def judge(responses: Any, prompts: Any) -> Any:
            names = [(r.weights_version, r.prompt_id, r.sample_index) for r in responses]
            if kind == "real":
                judgements = judge_really(responses, prompts)
                known.update(zip(names, judgements, strict=True))
                return judgements
            return [known[name] for name in names]

        sampler.judge = judge
        if pace:
            run.engine.stream = _paced(run.engine.stream, pace)  # type: ignore[method-assign]
        run.weight_sync.push(version=0)
        for step, report in enumerate(steps(), 1):
            if kind == "free":
                known.update(pickle.loads(notes.read_bytes()))
            began = time.perf_counter()
            train_step(run, step)
            whole = time.perf_counter() - began
            if kind == "real":
                notes.write_bytes(pickle.dumps(known))
            row = json.loads(run.recorder.metrics_path.read_text().splitlines()[-1])
            phases = {phase: row[f"time/{phase}"] for phase in PHASES}
            report(whole=whole, **phases, trained=[row["loss/policy"], row["grad_norm/total"]])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _train(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
    else:
        main()
