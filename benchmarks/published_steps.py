"""``dcpo plan`` against step times that others have published: ``docs/published_steps.csv``, from
NeMo-RL's performance summaries and the recipes beside them.

    python benchmarks/published_steps.py          # what the plan's rates say, and the errors
    python benchmarks/published_steps.py --fit    # fit the six rates again; leave one setting out

A setting is a model, a way of running (on policy, one step off, ...) and a number of GPUs; it is
left out with all its rows. Rows of another machine (GB200) are never fitted. This needs no GPU, and
takes a minute.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from megatron_dcpo.config import Config, load_config
from megatron_dcpo.planning.decoding import decoding_costs
from megatron_dcpo.planning.machine import Machine, Rates
from megatron_dcpo.planning.plan import Plan, make_plan
from megatron_dcpo.planning.step_time import step_seconds

PUBLISHED = Path(__file__).resolve().parents[1] / "docs" / "published_steps.csv"
PROMPT = 128
GROUP = 32
MOST_SEQUENCES = 256  # vLLM's default
MACHINES = {
    "H100": Rates(),
    "GB200": Rates(peak_tflops=2500.0, hbm_gbps=8000.0, nvlink_gbps=900.0, gpus_per_node=72),
}
FITTED = (
    "mfu",
    "expert_mfu",
    "decode_layer_us",
    "decode_sequence_us",
    "across_nodes_ms",
    "changeover_seconds",
)
# where a fit begins; the logarithm of a rate is drawn to it with this weight, so that one that the
# rows left do not determine stays where it was
START = (0.4, 0.12, 60.0, 30.0, 10.0, 12.0)
PULL = 0.05


@dataclass(frozen=True)
class Row:
    """A published step: what ran, and how long it took."""

    release: str
    machine: str
    model: str
    mode: str
    trainers: int
    engines: int
    mean_sequence: int
    longest: int
    responses: int
    updates: int
    tp: int
    cp: int
    ep: int
    pp: int
    engine_tp: int
    engine_memory: float
    recompute: str
    passes: int
    seconds: float

    @property
    def setting(self) -> tuple[str, str, int, str]:
        return self.model, self.mode, self.trainers + self.engines, self.machine

    @property
    def name(self) -> str:
        gpus = f"{self.trainers} + {self.engines}" if self.engines else f"{self.trainers}"
        return f"{self.model.rpartition('/')[2]}, {self.mode}, {gpus} {self.machine}"

    @cached_property
    def plans(self) -> tuple[Plan, Plan]:
        """Return the plan of the trainers, and one for the GPUs that generate: the same if they are
        the same. The engine is vLLM in both, since mixtures have no server of their own here.
        """
        training = self._plan(self.trainers)
        if not self.engines:
            return training, training
        return training, self._plan(self.engines)

    def _plan(self, gpus: int) -> Plan:
        machine = Machine(
            gpus=gpus,
            gpu_memory_gb=80.0 if self.machine == "H100" else 186.0,
            response_tokens=self.mean_sequence - PROMPT,
        )
        return make_plan(self._config(), machine, MACHINES[self.machine])

    def _config(self) -> Config:
        options = [
            f"data.max_prompt_length={PROMPT}",
            f"data.prompts_per_step={self.responses // GROUP}",
            f"rollout.group_size={GROUP}",
            f"rollout.max_response_length={self.longest - PROMPT}",
            f"rollout.max_num_seqs={MOST_SEQUENCES}",
            f"rollout.tensor_model_parallel_size={self.engine_tp}",
            f"rollout.gpu_memory_utilization={self.engine_memory}",
            f"training.updates_per_rollout={self.updates}",
            f"training.max_tokens_per_micro_batch={self.longest}",
            f"parallel.tensor_model_parallel_size={self.tp}",
            f"parallel.sequence_parallel={str(self.tp > 1).lower()}",
            f"parallel.context_parallel_size={self.cp}",
            f"parallel.pipeline_model_parallel_size={self.pp}",
            f"parallel.recompute_granularity={self.recompute}",
            "parallel.sequence_packing=true",
            "parallel.use_distributed_optimizer=true",
        ]
        if self.ep > 1:
            options.append(f"parallel.expert_model_parallel_size={self.ep}")
            options.append("parallel.expert_tensor_parallel_size=1")
        if self.pp == 8:  # 94 layers; at PP 4 they divide as 23, 24, 24, 23
            options.append("parallel.megatron.num_layers_in_first_pipeline_stage=11")
            options.append("parallel.megatron.num_layers_in_last_pipeline_stage=11")
        elif self.pp == 4 and "235B" in self.model:
            options.append("parallel.megatron.num_layers_in_first_pipeline_stage=23")
            options.append("parallel.megatron.num_layers_in_last_pipeline_stage=23")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "published.yaml"
            path.write_text(
                f"run_dir: run\nmodel: {{path: {self.model}, params_dtype: bf16}}\n"
                "data: {path: problems.jsonl}\nobjective: {name: grpo}\n"
            )
            return load_config(path, options)


def read_rows(path: Path = PUBLISHED) -> tuple[list[Row], list[dict[str, str]]]:
    """Return the rows that are planned, and the others as they stand, with the reason."""
    planned: list[Row] = []
    others: list[dict[str, str]] = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row.pop("not_planned"):
                others.append(row)
            else:
                planned.append(_row_of(row))
    return planned, others


def _row_of(row: dict[str, str]) -> Row:
    texts = ("release", "machine", "model", "mode", "recompute")
    numbers = ("engine_memory", "seconds")
    values: dict[str, object] = {}
    for name, text in row.items():
        if name in texts:
            values[name] = text
        elif name in numbers:
            values[name] = float(text)
        else:
            values[name] = int(text)
    return Row(**values)  # type: ignore[arg-type]


def predicted(row: Row, rates: Rates) -> float:
    """Return the seconds that the plan says for a published step."""
    training, generation = row.plans
    seconds = step_seconds(
        arch=training.arch,
        layout=training.layout,
        config=training.config,
        load=replace(training.load, work=replace(training.work, forward_passes=row.passes)),
        machine=training.machine,
        rates=rates,
    )
    if not row.engines:
        return seconds.total
    rest = seconds.total - seconds.rollout - seconds.changeover - seconds.resharding
    return max(rest, generated(row, generation, rates)) + seconds.resharding


def generated(row: Row, plan: Plan, rates: Rates) -> float:
    """Return how long the GPUs that only generate take for a step's responses. Eight steps off,
    engines never run dry: each has as many sequences at once as its cache holds.
    """
    costs = decoding_costs(plan.arch, plan.engine, rates)
    if row.mode != "eight steps off":
        return plan.load.decoding.seconds(costs)
    context = np.array(PROMPT + plan.work.response_length / 2)
    at_once = np.minimum(MOST_SEQUENCES, plan.engine.cached_tokens / context)
    engines = row.engines / row.engine_tp
    steps = row.responses * plan.work.response_length / engines / at_once
    return float(steps * costs.seconds(at_once, context))


def fitted(rows: Sequence[Row]) -> Rates:
    """Return the rates of an H100 that fit these rows best, by the logarithms of their seconds."""
    published = np.log([row.seconds for row in rows])
    start = np.log(START)

    def differences(logarithms: np.ndarray) -> np.ndarray:
        rates = _with(logarithms)
        said = np.log([predicted(row, rates) for row in rows])
        return np.concatenate([said - published, PULL * (logarithms - start)])

    return _with(least_squares(differences, start, diff_step=1e-3).x)


def _with(logarithms: np.ndarray) -> Rates:
    return replace(Rates(), **dict(zip(FITTED, np.exp(logarithms).tolist(), strict=True)))


def on_machine(rates: Rates, machine: str) -> Rates:
    """Return fitted rates with what another machine's data sheet says."""
    own = MACHINES[machine]
    return replace(own, **{name: getattr(rates, name) for name in FITTED})


def print_rows(rows: Sequence[Row], rates_of: Callable[[Row], Rates]) -> list[float]:
    """Print a line for each row; return the relative errors."""
    errors = []
    for row in rows:
        said = predicted(row, rates_of(row))
        errors.append(said / row.seconds - 1)
        print(
            f"{row.release}  {row.name:58} {row.seconds:6.1f} s  {said:6.1f} s  {errors[-1]:+.0%}"
        )
    sizes = np.abs(errors)
    print(f"{len(rows)} rows: median {np.median(sizes):.1%}, largest {sizes.max():.1%}\n")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the rates again")
    arguments = parser.parse_args()
    planned, others = read_rows()
    h100 = [row for row in planned if row.machine == "H100"]
    other_machines = [row for row in planned if row.machine != "H100"]
    print("as the plan has it")
    print_rows(h100, lambda row: Rates())
    if arguments.fit:
        rates = fitted(h100)
        print({name: float(f"{getattr(rates, name):.3g}") for name in FITTED})
        for left_out in ("setting", "model"):
            print(f"each row predicted without its {left_out}")
            found = {
                key: fitted([row for row in h100 if getattr(row, left_out) != key])
                for key in {getattr(row, left_out) for row in h100}
            }
            print_rows(h100, lambda row, of=found, by=left_out: of[getattr(row, by)])
    print("another machine, by its data sheet; nothing fitted")
    print_rows(other_machines, lambda row: on_machine(Rates(), row.machine))
    print(f"not planned: {len(others)} rows")


if __name__ == "__main__":
    main()
