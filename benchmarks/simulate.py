"""``dcpo plan --simulate`` against measured steps: the quickstart's model on the CPU in four layouts.

For each layout two batch sizes calibrate the costs (a decoding step, a trained token, the rest), and the simulation says
how long a step of a third batch size between them takes. The quickest third of the steps counts, on both sides: other
work on the machine is not part of the model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measurement import Measurement, alone, torchrun

LAYOUTS = {
    "1 process": (1, ()),
    "DP 2": (2, ()),
    "TP 2": (2, ("parallel.tensor_model_parallel_size=2",)),
    "PP 2": (2, ("parallel.pipeline_model_parallel_size=2",)),
}
SMALL, TESTED, LARGE = 16, 32, 48  # prompts per step
GROUP, LONGEST, ROUNDS = 8, 32, 12


@dataclass(frozen=True)
class Measured:
    """Seconds of a step's parts, and the mean and the largest length of its responses."""

    rollout: float
    training: float
    rest: float
    mean: float
    longest: int

    @property
    def seconds(self) -> float:
        return self.rollout + self.training + self.rest


def measure(folder: Path, processes: int, options: tuple[str, ...]) -> dict[int, Measured]:
    """By prompts per step; the sizes take turns in one run, so that other work on the machine meets all of them."""
    torchrun(processes, __file__, json.dumps([str(folder), *options]))
    rows = json.loads((folder / "steps.json").read_text())[1:]
    found = {}
    for position, prompts in enumerate((SMALL, TESTED, LARGE)):
        mine = [row[position] for row in rows]

        def low(*keys: str, mine: list[dict[str, float]] = mine) -> float:
            return float(np.mean(sorted(sum(row[key] for key in keys) for row in mine)[: len(rows) // 3]))

        mean = float(np.mean([row["tokens"] for row in mine])) / (prompts * GROUP)
        found[prompts] = Measured(low("rollout"), low("train"), low("judge", "reshard"), mean, LONGEST)
    return found


def worker(folder: Path, *options: str) -> None:
    import policies

    from megatron_dcpo.runtime.distributed import destroy

    more = [f"model.path={policies.QUICKSTART}/policy", "training.micro_batch_size=32", *options]
    rows = []
    with policies.training_run(policies.overrides(folder, folder / "run", LARGE, GROUP, LONGEST, *more)) as run:
        for turn in range(ROUNDS + 1):
            row = []
            for position, prompts in enumerate((SMALL, TESTED, LARGE)):
                run.sampler.prompts_per_step = prompts
                row.append(policies.training_step(run, 3 * turn + position + 1))
            rows.append(row)
        if run.policy.topology.rank == 0:
            (folder / "steps.json").write_text(json.dumps(rows))
    destroy()


def predicted(runs: dict[int, Measured], processes: int) -> float:
    """Seconds of a step of ``TESTED`` prompts, from the other two runs."""
    from megatron_dcpo.planning.simulate import Costs, simulate

    small, large = runs[SMALL], runs[LARGE]
    # the embedded engine decodes until its longest response has ended
    per_step = [run.rollout / run.longest for run in (small, large)]
    at_once = [prompts * GROUP / processes for prompts in (SMALL, LARGE)]
    token = (per_step[1] - per_step[0]) / (at_once[1] - at_once[0])
    trained = [run.mean * prompts * GROUP for run, prompts in ((small, SMALL), (large, LARGE))]
    train_token = (large.training - small.training) / (trained[1] - trained[0])
    costs = Costs(
        engines=processes, slots=512, read=per_step[0] - token * at_once[0], token=token, kv=0.0, prompt=0.0,
        prompt_tokens=0, judge=0.0, judges=1, train=small.training - train_token * trained[0], train_token=train_token,
        transfer=(small.rest + large.rest) / 2, save=0.0,
    )  # fmt: skip
    n, longest, mean = TESTED * GROUP, max(small.longest, large.longest), (small.mean + large.mean) / 2
    (step,) = simulate(costs, iter([longest] * n), n, 1)
    return step.rollout + costs.train + costs.train_token * n * mean + costs.transfer


def measurements() -> Iterator[Measurement]:
    for name, (processes, options) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            runs = measure(Path(scratch), processes, options)
        ours, other = predicted(runs, processes), runs[TESTED].seconds
        reason = f"off by {abs(ours / other - 1):.0%}, at most 15 %"
        raw = {str(n): vars(run) for n, run in runs.items()}
        off = abs(ours - other)
        yield Measurement(
            f"simulate/{name}",
            off,
            other,
            f"s apart, predicted {ours:.3f}",
            "a measured step",
            0.15,
            reason=reason,
            raw=raw,
        )


if __name__ == "__main__":
    alone("simulate", measurements, lambda options: worker(Path(options[0]), *options[1:]))
