"""``dcpo plan --simulate`` against measured steps: the quickstart's model on the CPU in four
layouts, and generation beside training as in ``async_step``.

For each layout two batch sizes calibrate the costs (a decoding step, a trained token, the rest),
and the simulation says how long a step of a third batch size between them takes. The quickest third
of the steps counts, on both sides: other work on the machine is not part of the model. *One step
off* the two sizes are of steps one after the other, and what is predicted are the steps beside the
generation of the next one, with the lengths that their responses had; medians.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from async_step import GROUP as BESIDE_GROUP
from async_step import PROMPTS, WARM_UP, in_turns
from measurement import QUICK, Measurement, absent, alone, torchrun

LAYOUTS = {
    "1 process": (1, ()),
    "DP 2": (2, ()),
    "TP 2": (2, ("parallel.tensor_model_parallel_size=2",)),
    "PP 2": (2, ("parallel.pipeline_model_parallel_size=2",)),
}
SMALL, TESTED, LARGE = 16, 32, 48  # prompts per step
GROUP, LONGEST, ROUNDS = (8, 32, 3) if QUICK else (8, 32, 12)


@dataclass(frozen=True)
class Measured:
    """Seconds of a step's parts, and the mean and the largest length of its responses. ``ragged``:
    a response that has ended is not decoded on.
    """

    rollout: float
    training: float
    rest: float
    mean: float
    longest: float
    ragged: bool = False

    @property
    def seconds(self) -> float:
        return self.rollout + self.training + self.rest


def measure(folder: Path, processes: int, options: tuple[str, ...]) -> dict[int, Measured]:
    """By prompts per step; the sizes take turns in one run, so that other work on the machine meets
    all of them.
    """
    torchrun(processes, __file__, json.dumps([str(folder), *options]))
    rows = json.loads((folder / "steps.json").read_text())[1:]
    found = {}
    for position, prompts in enumerate((SMALL, TESTED, LARGE)):
        mine = [row[position] for row in rows]

        def low(*keys: str, mine: list[dict[str, float]] = mine) -> float:
            return float(
                np.mean(sorted(sum(row[key] for key in keys) for row in mine)[: len(rows) // 3])
            )

        mean = float(np.mean([row["tokens"] for row in mine])) / (prompts * GROUP)
        found[prompts] = Measured(
            low("rollout"), low("train"), low("judge", "reshard"), mean, LONGEST
        )
    return found


def worker(folder: Path, *options: str) -> None:
    import policies

    from megatron_dcpo.runtime.distributed import destroy

    more = [f"model.path={policies.QUICKSTART}/policy", "training.micro_batch_size=32", *options]
    rows = []
    with policies.training_run(
        policies.overrides(folder, folder / "run", LARGE, GROUP, LONGEST, *more)
    ) as run:
        for turn in range(ROUNDS + 1):
            row = []
            for position, prompts in enumerate((SMALL, TESTED, LARGE)):
                run.rollouts.sampler.prompts_per_step = prompts
                row.append(policies.training_step(run, 3 * turn + position + 1))
            rows.append(row)
        if run.policy.topology.rank == 0:
            (folder / "steps.json").write_text(json.dumps(rows))
    destroy()


def calibrated(
    small: Measured, large: Measured, responses: tuple[int, int], processes: int = 1
) -> Any:
    """The simulation's costs, from two steps of so many ``responses``."""
    from megatron_dcpo.planning.simulate import Costs

    runs = list(zip((small, large), responses, strict=True))
    # the embedded engine decodes until its longest response has ended
    per_step = [run.rollout / run.longest for run, _ in runs]
    at_once = [n * (run.mean / run.longest if run.ragged else 1) / processes for run, n in runs]
    token = (per_step[1] - per_step[0]) / (at_once[1] - at_once[0])
    trained = [run.mean * n for run, n in runs]
    train_token = (large.training - small.training) / (trained[1] - trained[0])
    return Costs(
        engines=processes,
        slots=512,
        read=per_step[0] - token * at_once[0],
        token=token,
        kv=0.0,
        prompt=0.0,
        prompt_tokens=0,
        judge=0.0,
        judges=1,
        train=small.training - train_token * trained[0],
        train_token=train_token,
        transfer=(small.rest + large.rest) / 2,
        save=0.0,
    )


def predicted(runs: dict[int, Measured], processes: int) -> float:
    """Seconds of a step of ``TESTED`` prompts, from the other two runs."""
    from megatron_dcpo.planning.simulate import simulate

    small, large = runs[SMALL], runs[LARGE]
    costs = calibrated(small, large, (SMALL * GROUP, LARGE * GROUP), processes)
    n, longest, mean = (
        TESTED * GROUP,
        int(max(small.longest, large.longest)),
        (small.mean + large.mean) / 2,
    )
    (step,) = simulate(costs, iter([longest] * n), n, 1)
    return step.rollout + costs.train + costs.train_token * n * mean + costs.transfer


def one_step_off() -> Iterator[Measurement]:
    """A step beside the generation of the next one, from two batch sizes one after the other."""
    from megatron_dcpo.planning import simulate

    small, large = PROMPTS // 2, PROMPTS * 3 // 2
    name, other = "simulate/one step off", "a measured step"
    taken = in_turns({"beside": [PROMPTS], "after": [small, large]})
    if not taken:
        yield absent(name, "s apart", other, "two cores are needed, one for each")
        return
    rows = {n: steps[WARM_UP:] for n, steps in taken["after"].items()}
    runs = {}
    for n, steps in rows.items():
        rest = [row["wall"] - row["rollout"] - row["train"] for row in steps]
        parts = [
            float(np.median(part))
            for part in ([r["rollout"] for r in steps], [r["train"] for r in steps], rest)
        ]
        mean = float(np.mean([length for row in steps for length in row["lengths"]]))
        runs[n] = Measured(
            *parts, mean, float(np.mean([max(row["lengths"]) for row in steps])), ragged=True
        )
    costs = calibrated(runs[small], runs[large], (small * BESIDE_GROUP, large * BESIDE_GROUP))
    beside = taken["beside"][PROMPTS][WARM_UP:]
    lengths = (length for row in beside for length in row["lengths"])
    steps_off = simulate.one_step_off(
        simulate.simulate(costs, lengths, PROMPTS * BESIDE_GROUP, len(beside))
    )
    measured = [
        row["wall"] for row in beside[:-1]
    ]  # the last one generated a batch that nobody took
    raw = {
        "one after the other": {str(n): vars(run) for n, run in runs.items()},
        "beside": measured,
    }
    yield _apart(
        name,
        float(np.median([step.seconds for step in steps_off])),
        float(np.median(measured)),
        raw,
    )


def _apart(name: str, ours: float, other: float, raw: Any) -> Measurement:
    reason = f"off by {abs(ours / other - 1):.0%}, at most 15 %"
    unit = f"s apart, predicted {ours:.3f}"
    return Measurement(
        name, abs(ours - other), other, unit, "a measured step", 0.15, reason=reason, raw=raw
    )


def measurements() -> Iterator[Measurement]:
    for name, (processes, options) in LAYOUTS.items():
        if QUICK and processes > 1:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            runs = measure(Path(scratch), processes, options)
        raw = {str(n): vars(run) for n, run in runs.items()}
        yield _apart(f"simulate/{name}", predicted(runs, processes), runs[TESTED].seconds, raw)
    if not QUICK:
        yield from one_step_off()


if __name__ == "__main__":
    alone("simulate", measurements, lambda options: worker(Path(options[0]), *options[1:]))
