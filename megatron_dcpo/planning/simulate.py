"""``dcpo plan --simulate``: a step event by event, from the planner's rates and a distribution of
response lengths.

Engines decode with continuous batching, judges take each response when it is finished, training
waits for the last verdict, then weights are transferred and, at intervals, a checkpoint is begun.
With ``rollout.async_steps`` the next batch is generated in the meantime, on other GPUs. The result
is a pure function of its arguments; random numbers come from the seed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.decoding import SPREAD, decoding_costs
from megatron_dcpo.planning.fastest import layouts
from megatron_dcpo.planning.machine import GB, Machine, Rates
from megatron_dcpo.planning.plan import Plan, make_plan
from megatron_dcpo.planning.traffic import sequence_flops

ALONE = 0.9  # the part of a GPU's memory for an engine that has the GPU to itself
# The number of simulated steps. The first is not counted, because partial rollouts begin with
# nothing carried over.
STEPS = 6


@dataclass(frozen=True)
class Costs:
    """The times that things take, in seconds.

    A decoding step of n sequences takes ``read + n (token + kv * context)``, and admission of a
    response takes ``prompt``. An update takes ``train + train_token * tokens``. ``save`` is a
    step's share of a checkpoint.
    """

    engines: int
    slots: int
    read: float
    token: float
    kv: float
    prompt: float
    prompt_tokens: int
    judge: float
    judges: int
    train: float
    train_token: float
    transfer: float
    save: float


@dataclass(frozen=True)
class Assumptions:
    """Assumptions that are neither in the configuration nor in the planner's rates."""

    judge_seconds: float = 0.05
    judges_per_node: int = 16
    copy_gbps: float = 20.0  # of a checkpoint into the host's memory, per GPU
    seed: int = 0


@dataclass
class Step:
    """One step, in seconds.

    rollout: until the last response.
    judging: the part of the judging that remains then.
    engine_busy, judge_busy: sums over engines and over judges.
    slot_steps: decoding positions, used and unused.
    beside: whether the batch trains while the next one is generated (whose ``rollout`` this is).
    """

    rollout: float = 0.0
    judging: float = 0.0
    training: float = 0.0
    transfer: float = 0.0
    save: float = 0.0
    engine_busy: float = 0.0
    judge_busy: float = 0.0
    generated: int = 0
    trained: int = 0
    carried: int = 0
    slot_steps: float = 0.0
    beside: bool = False

    @property
    def seconds(self) -> float:
        generation = self.rollout + self.judging
        training = self.training + self.save
        if self.beside:
            return max(generation, training) + self.transfer
        return generation + training + self.transfer

    @property
    def engines_wait(self) -> float:
        """Return how long the engines wait for the training."""
        if self.beside:
            return max(0.0, self.training + self.save - self.rollout - self.judging)
        return self.training

    @property
    def trainers_wait(self) -> float:
        """Return how long the trainers wait for the rollout."""
        if self.beside:
            return max(0.0, self.rollout + self.judging - self.training - self.save)
        return self.rollout


@dataclass(frozen=True, order=True)
class _Sequence:
    """A running sequence: the position of the engine at which it ends, its length, and the position
    at which it would have begun without interruptions.
    """

    ends: float
    length: int
    begun: float


@dataclass
class _Engine:
    """Continuous batching: all running sequences advance together.

    waiting: the length of each waiting response, and how much of it is done.
    position: the tokens decoded since the beginning.
    clock: the seconds of this step.
    due: the time at which the next sequence ends.
    """

    costs: Costs
    waiting: deque[tuple[int, int]] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    position: float = 0.0
    clock: float = 0.0
    due: float = math.inf

    def refill(self, draw: Iterator[int] | None) -> float:
        """Fill the slots, with new responses if there is a ``draw``; return ``due``."""
        costs = self.costs
        admitted = 0
        while draw is not None and len(self.waiting) + len(self.running) < costs.slots:
            self.waiting.append((next(draw), 0))
        while self.waiting and len(self.running) < costs.slots:
            length, done = self.waiting.popleft()
            sequence = _Sequence(
                ends=self.position + length - done, length=length, begun=self.position - done
            )
            heapq.heappush(self.running, sequence)
            admitted += 1
        self.due = math.inf
        if self.running:
            n = len(self.running)
            ahead = self.running[0].ends - self.position
            mean_begin = sum(sequence.begun for sequence in self.running) / n
            context = costs.prompt_tokens + self.position - mean_begin + ahead / 2
            decoding = ahead * (costs.read + n * (costs.token + costs.kv * context))
            self.due = self.clock + admitted * costs.prompt + decoding
        return self.due

    def finish_one(self, step: Step) -> int:
        """Go to the next end; return the length of the sequence that ended."""
        self._decode(self.running[0].ends - self.position, step)
        self.clock = self.due
        return heapq.heappop(self.running).length

    def stop(self, step: Step) -> None:
        """End the rollout between two ends: running sequences go back to ``waiting`` with their
        tokens.
        """
        if self.running:
            share = 0.0
            if self.due > self.clock:
                share = (step.rollout - self.clock) / (self.due - self.clock)
            ahead = self.running[0].ends - self.position
            self._decode(math.floor(ahead * share), step)
        unfinished = []
        for sequence in sorted(self.running):
            done = round(self.position - sequence.begun)
            unfinished.append((sequence.length, done))
            step.carried += done
        self.waiting.extendleft(reversed(unfinished))
        self.running = []
        self.clock = 0.0
        self.due = math.inf

    def _decode(self, tokens: float, step: Step) -> None:
        self.position += tokens
        step.generated += round(len(self.running) * tokens)
        step.slot_steps += self.costs.slots * tokens


def simulate(
    costs: Costs, draw: Iterator[int], responses: int, steps: int, partial: bool = False
) -> list[Step]:
    """Simulate ``steps`` steps of ``responses`` responses, which are dealt to the engines in turn;
    their lengths come from ``draw``.

    With ``partial`` rollouts engines never run dry. A rollout ends with the last response that is
    wanted, and unfinished responses are carried over.
    """
    engines = [_Engine(costs) for _ in range(costs.engines)]
    refills = draw if partial else None
    simulated = []
    carried = 0
    for _ in range(steps):
        step = Step()
        if not partial:
            for index in range(responses):
                engines[index % costs.engines].waiting.append((next(draw), 0))
        judges = [0.0] * costs.judges
        busy = [0.0] * costs.engines
        queue = [(engine.refill(refills), index) for index, engine in enumerate(engines)]
        heapq.heapify(queue)
        for _ in range(responses):
            step.rollout, index = heapq.heappop(queue)
            step.trained += engines[index].finish_one(step)
            busy[index] = step.rollout
            judging_starts = max(step.rollout, heapq.heappop(judges))
            heapq.heappush(judges, judging_starts + costs.judge)
            heapq.heappush(queue, (engines[index].refill(refills), index))
        for index, engine in enumerate(engines):
            if engine.running:
                busy[index] = step.rollout
            engine.stop(step)
        step.engine_busy = sum(busy)
        step.judge_busy = costs.judge * responses
        step.judging = max(0.0, max(judges) - step.rollout)
        tokens = step.trained + responses * costs.prompt_tokens
        step.training = costs.train + costs.train_token * tokens
        step.transfer = costs.transfer
        step.save = costs.save
        conserved = step.generated + carried == step.trained + step.carried
        assert conserved, "tokens are neither lost nor made"
        carried = step.carried
        simulated.append(step)
    return simulated


def one_step_off(steps: Sequence[Step]) -> list[Step]:
    """Return ``steps`` as they are if each batch trains while the next one is generated; there is
    one less.
    """
    overlapped = []
    for now, coming in itertools.pairwise(steps):
        overlapped.append(replace(coming, training=now.training, trained=now.trained, beside=True))
    return overlapped


def costs_of(plan: Plan, assumed: Assumptions, times: int = 1) -> Costs:
    """Return the planner's rates as costs, with ``times`` as many GPUs for the rollout alone."""
    engine = plan.engine
    rates = plan.rates
    size = engine.tensor_model_parallel_size
    gpus = plan.machine.gpus
    per_second = size * rates.peak_tflops * 1e12 * rates.mfu
    prompt = plan.config.data.max_prompt_length
    one_prompt = sequence_flops(plan.arch, plan.layout, tokens=prompt, length=prompt)
    decoding = decoding_costs(plan.arch, engine, rates)
    seconds = plan.seconds
    training = seconds.forward + seconds.update + seconds.tensor_parallel + seconds.context_parallel
    training += seconds.expert_parallel + seconds.pipeline
    interval = plan.config.training.save_interval
    save = 0.0
    if interval:
        saved_gb = max(stage.saved for stage in plan.stages) / GB
        save = saved_gb / assumed.copy_gbps / interval
    return Costs(
        engines=times * (plan.machine.engine_gpus or gpus) // size,
        slots=max(1, engine.concurrent),
        read=decoding.step + decoding.dense + decoding.experts,
        token=decoding.sequence,
        kv=decoding.kv,
        prompt=one_prompt / per_second / plan.config.rollout.group_size,
        prompt_tokens=prompt,
        judge=assumed.judge_seconds,
        judges=assumed.judges_per_node * -(-gpus // rates.gpus_per_node),
        train=seconds.data_parallel,
        train_token=training / plan.work.tokens,
        transfer=seconds.resharding + seconds.changeover,
        save=save,
    )


def read_lengths(path: str) -> list[int]:
    """Read whole numbers, one per line or separated by spaces. Raises :class:`UserError`."""
    try:
        lengths = [int(word) for word in Path(path).read_text().split()]
    except (OSError, ValueError) as error:
        raise UserError(
            f"--lengths {path}: {error}; write response lengths in tokens, whole numbers"
        ) from None
    if not lengths or min(lengths) < 1:
        raise UserError(f"--lengths {path}: needs at least one length, and none below 1")
    return lengths


def length_stream(lengths: Sequence[int], mean: int, most: int, seed: int) -> Iterator[int]:
    """Yield lengths drawn from ``lengths``, or from a log-normal distribution with that ``mean``;
    at least 1, at most ``most``.
    """
    rng = np.random.default_rng(seed)
    location = math.log(mean) - SPREAD**2 / 2
    while True:
        if lengths:
            drawn = rng.choice(lengths, 4096)
        else:
            drawn = rng.lognormal(location, SPREAD, 4096)
        yield from (int(length) for length in np.clip(np.rint(drawn), 1, most))


@dataclass(frozen=True)
class Scenario:
    """A simulated setting, and its steps after the first."""

    name: str
    costs: Costs
    responses: int
    steps: tuple[Step, ...]

    def mean(self, part: str) -> float:
        return float(np.mean([getattr(step, part) for step in self.steps]))

    @property
    def shares(self) -> dict[str, float]:
        """Return the part of the step in which each resource is busy. ``slots`` is the part of the
        rollout's decoding positions that are used.
        """
        total = self.mean("seconds")
        return {
            "engines": self.mean("engine_busy") / self.costs.engines / total,
            "slots": self.mean("generated") / max(1.0, self.mean("slot_steps")),
            "judges": self.mean("judge_busy") / self.costs.judges / total,
            "trainers": self.mean("training") / total,
        }


def scenarios(
    config: Config,
    machine: Machine,
    rates: Rates,
    assumed: Assumptions,
    lengths: Sequence[int] = (),
) -> list[Scenario]:
    """Simulate the run as configured, with partial rollouts, with twice the GPUs for the rollout,
    and the fastest of each of these kinds that fits: the same GPUs divided into trainers and
    engines, one step off; all of them for both, if a server is configured; another layout. Raises
    :class:`UserError` if a server has no GPUs.
    """
    if config.rollout.engine == "server" and not machine.engine_gpus:
        raise UserError(
            "--simulate with rollout.engine=server needs --gpus N for the trainers and "
            "--engine-gpus M for the engines"
        )
    most = config.rollout.max_response_length
    if lengths:
        mean = round(float(np.mean(np.minimum(lengths, most))))
    else:
        mean = machine.response_tokens or -(-most // 3)
    machine = replace(machine, response_tokens=min(max(1, mean), most))

    def run(name: str, plan: Plan, times: int = 1, partial: bool = False) -> Scenario:
        return _run(
            name=name,
            plan=plan,
            costs=costs_of(plan, assumed, times),
            draw=length_stream(
                lengths=lengths, mean=machine.response_tokens, most=most, seed=assumed.seed
            ),
            partial=partial,
        )

    plan = make_plan(config, machine, rates)
    results = [run("as configured", plan)]
    if config.rollout.engine != "server":
        results.append(run("partial rollouts", plan, partial=True))
    results.append(run("twice the GPUs for the rollout", plan, times=2))
    for alternatives in (
        _splits(config, machine, rates),
        _colocated(plan),
        _other_layouts(config, machine),
    ):
        fitting = [run(name, other) for name, other in _fitting(alternatives, rates)]
        if fitting:
            results.append(min(fitting, key=lambda scenario: scenario.mean("seconds")))
    return results


def _run(name: str, plan: Plan, costs: Costs, draw: Iterator[int], partial: bool) -> Scenario:
    config = plan.config
    responses = config.data.prompts_per_step * config.rollout.group_size
    steps = simulate(costs=costs, draw=draw, responses=responses, steps=STEPS, partial=partial)
    counted = steps[1:]
    if config.rollout.async_steps:
        counted = one_step_off(steps)
    return Scenario(name=name, costs=costs, responses=responses, steps=tuple(counted))


# name, configuration and machine of a setting
_Named = Iterator[tuple[str, Config, Machine]]


def _fitting(alternatives: _Named, rates: Rates) -> Iterator[tuple[str, Plan]]:
    """Yield the plans that fit."""
    for name, config, machine in alternatives:
        try:
            plan = make_plan(config, machine, rates)
        except UserError:
            continue
        if plan.fits:
            yield name, plan


def _splits(config: Config, machine: Machine, rates: Rates) -> _Named:
    """Yield every division of the GPUs into trainers and engines, in whole nodes if there are
    several. The engines share their GPUs with nobody.
    """
    gpus = machine.gpus + machine.engine_gpus
    unit = 1
    if gpus > rates.gpus_per_node:
        unit = rates.gpus_per_node
    memory = max(ALONE, config.rollout.gpu_memory_utilization)
    rollout = replace(config.rollout, engine="server", async_steps=1, gpu_memory_utilization=memory)
    changed = replace(config, rollout=rollout)
    for trainers in range(unit, gpus, unit):
        engines = gpus - trainers
        split = replace(machine, gpus=trainers, engine_gpus=engines)
        yield f"one step off, {trainers} + {engines}", changed, split


def _colocated(plan: Plan) -> _Named:
    """Yield settings in which trainers and a server's engines take turns on all GPUs, with more or
    less memory for an engine.
    """
    if not plan.machine.engine_gpus:
        return
    gpus = plan.machine.gpus + plan.machine.engine_gpus
    config = plan.config
    machine = replace(plan.machine, gpus=gpus, engine_gpus=0)
    size = plan.engine.tensor_model_parallel_size
    rollout = replace(config.rollout, engine="vllm", async_steps=0, tensor_model_parallel_size=size)
    training = replace(config.training, offload_optimizer_during_rollout=True)
    for memory in (0.9, 0.8, 0.7, 0.6, 0.5):
        engines = replace(rollout, gpu_memory_utilization=memory)
        changed = replace(config, rollout=engines, training=training)
        yield f"colocated on {gpus} GPUs", changed, machine


def _other_layouts(config: Config, machine: Machine) -> _Named:
    parallel = config.parallel
    now = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    for other in layouts(config):
        tp = other.parallel.tensor_model_parallel_size
        pp = other.parallel.pipeline_model_parallel_size
        if (tp, pp) != now:
            yield f"TP {tp} x PP {pp}", other, machine


def waits(scenario: Scenario) -> dict[str, float]:
    """Return for each reason how long a resource waits, in seconds of a step."""
    idle = scenario.mean("rollout") - scenario.mean("engine_busy") / scenario.costs.engines
    engines = "all"
    trainers = "all"
    if scenario.steps[0].beside:
        engines = "engines"
        trainers = "trainers"
    return {
        "engines wait for the longest responses": idle,
        "engines wait for the training": scenario.mean("engines_wait"),
        "trainers wait for the rollout": scenario.mean("trainers_wait"),
        f"{engines} wait for the last verdicts": scenario.mean("judging"),
        "all wait for the weight transfer": scenario.mean("transfer"),
        f"{trainers} wait for checkpoints": scenario.mean("save"),
    }


PARTS = ("seconds", "rollout", "judging", "training", "transfer", "save")


def scenario_facts(simulated: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Return the scenarios as plain data: seconds of a step and its parts, shares of resources,
    waits, tokens.
    """
    facts = []
    for scenario in simulated:
        parts = {part: scenario.mean(part) for part in PARTS}
        facts.append(
            {
                "scenario": scenario.name,
                **parts,
                "busy": scenario.shares,
                "waits": waits(scenario),
                "tokens": scenario.mean("trained"),
                "engines": scenario.costs.engines,
                "slots": scenario.costs.slots,
            }
        )
    return facts


def scenario_lines(
    simulated: Sequence[Scenario], rates: Rates, assumed: Assumptions, lengths: str | None
) -> list[str]:
    """Return a table of the scenarios, the waits of the first one and of those one step off, and
    the assumptions.
    """
    columns = "".join(f"{part:>10}" for part in ("total", *PARTS[1:]))
    busy = "busy: engines, their slots, judges, trainers"
    lines = [f"{'seconds of a step':32}{columns}   {busy}"]
    for scenario in simulated:
        numbers = "".join(f"{scenario.mean(part):10.2f}" for part in PARTS)
        shares = " ".join(f"{share:6.0%}" for share in scenario.shares.values())
        lines.append(f"{scenario.name:32}{numbers}   {shares}")
    lines.append(_waiting_line(simulated[0]))
    for scenario in simulated:
        if scenario.name.startswith("one step off"):
            lines.append(_waiting_line(scenario))
    costs = simulated[0].costs
    drawn = f"log-normal lengths, sigma {SPREAD:g}"
    if lengths:
        drawn = f"lengths drawn from {lengths}"
    mean = simulated[0].mean("trained") / simulated[0].responses
    lines.append(
        f"Assumed: {drawn}, mean {mean:.0f} tokens; {costs.engines} engines of {costs.slots} "
        f"sequences, responses dealt in turn; {rates.peak_tflops:g} TFLOP/s at {rates.mfu:.0%} and "
        f"{rates.hbm_gbps:g} GB/s per GPU; {assumed.judge_seconds:g} s per verdict, "
        f"{costs.judges} at a time, while the rest is generated; checkpoints block for a copy at "
        f"{assumed.copy_gbps:g} GB/s; engines and trainers take turns on the same GPUs, except "
        f"for a server's and one step off (trainers + engines, with {ALONE:.0%} of their memory), "
        "which get all weights by NCCL; partial rollouts carry over unfinished responses, however "
        "old."
    )
    return lines


def _waiting_line(scenario: Scenario) -> str:
    ordered = sorted(waits(scenario).items(), key=lambda item: -item[1])
    total = scenario.mean("seconds")
    waiting = [f"{what} {seconds:.2f} s ({seconds / total:.0%})" for what, seconds in ordered]
    return f"{scenario.name[0].upper()}{scenario.name[1:]}: {'; '.join(waiting)}"
