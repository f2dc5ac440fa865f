"""``dcpo plan --simulate``: a step event by event, from the planner's rates and a distribution of
response lengths.

Engines decode with continuous batching, judges take each response when it is finished, training
waits for the last verdict, then weights are transferred and, every so often, a checkpoint is begun.
Or, with ``rollout.async_steps``, the next batch is generated meanwhile, on other GPUs. Pure; random
only through the seed.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.plan import GB, Machine, Plan, make_plan
from megatron_dcpo.planning.traffic import Rates, sequence_flops
from megatron_dcpo.weights.layout import UNEVEN_PIPELINE

ALONE = 0.9  # of its GPU's memory, an engine that has it alone
SPREAD = 0.7  # sigma of the default log-normal lengths
STEPS = 6  # simulated; the first is left out: partial rollouts begin with nothing carried


@dataclass(frozen=True)
class Costs:
    """What things take, seconds. A decoding step of n sequences takes ``read + n (token + kv *
    context)``, admission ``prompt`` per response; an update ``train + train_token * tokens``;
    ``save`` is a step's share of a checkpoint.
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
class Environment:
    """What is neither in the configuration nor in the planner's rates."""

    judge_seconds: float = 0.05
    judges_per_node: int = 16
    copy_gbps: float = 20.0  # of a checkpoint into the host's memory, per GPU
    seed: int = 0


@dataclass
class Step:
    """One step, seconds; ``rollout`` until the last response, ``judging`` what is left then.
    ``engine_busy`` is the sum over engines, ``judge_busy`` over judges; ``slot_steps`` counts
    decoding positions, used and unused. ``beside``: the batch trains while the next one, whose
    ``rollout`` this is, is generated.
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
        return (max(generation, training) if self.beside else generation + training) + self.transfer

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


@dataclass
class _Engine:
    """Continuous batching: all running sequences advance together. ``at``: tokens decoded since the
    beginning, of which a sequence ends at its own count; ``clock``: seconds of this step, ``due``
    when the next sequence ends.
    """

    costs: Costs
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # length, done already
    running: list[tuple[float, int, float]] = field(
        default_factory=list
    )  # ends at, length, virtual start
    at: float = 0.0
    clock: float = 0.0
    due: float = math.inf

    def refill(self, draw: Iterator[int] | None) -> float:
        """Fill the slots, with new responses where ``draw`` has them; returns ``due``."""
        costs = self.costs
        new = 0
        while draw is not None and len(self.waiting) + len(self.running) < costs.slots:
            self.waiting.append((next(draw), 0))
        while self.waiting and len(self.running) < costs.slots:
            length, done = self.waiting.popleft()
            heapq.heappush(self.running, (self.at + length - done, length, self.at - done))
            new += 1
        self.due = math.inf
        if self.running:
            n = len(self.running)
            ahead = self.running[0][0] - self.at
            context = (
                costs.prompt_tokens
                + self.at
                - sum(start for _, _, start in self.running) / n
                + ahead / 2
            )
            self.due = (
                self.clock
                + new * costs.prompt
                + ahead * (costs.read + n * (costs.token + costs.kv * context))
            )

        return self.due

    def finish_one(self, step: Step) -> int:
        """Go to the next end; the length of what ended."""
        self._decode(self.running[0][0] - self.at, step)
        self.clock = self.due
        return heapq.heappop(self.running)[1]

    def stop(self, step: Step) -> None:
        """End the rollout between two ends: what runs goes back to ``waiting`` with its tokens."""
        if self.running:
            if self.due > self.clock:
                share = (step.rollout - self.clock) / (self.due - self.clock)
            else:
                share = 0.0
            self._decode(math.floor((self.running[0][0] - self.at) * share), step)
        parts = [(length, round(self.at - start)) for _, length, start in sorted(self.running)]
        step.carried += sum(done for _, done in parts)
        self.waiting.extendleft(reversed(parts))
        self.running = []
        self.clock = 0.0
        self.due = math.inf

    def _decode(self, tokens: float, step: Step) -> None:
        self.at += tokens
        step.generated += round(len(self.running) * tokens)
        step.slot_steps += self.costs.slots * tokens


def simulate(
    costs: Costs, draw: Iterator[int], responses: int, steps: int, partial: bool = False
) -> list[Step]:
    """Simulate ``steps`` steps of ``responses`` responses, dealt in turn to the engines; lengths
    from ``draw``.

    ``partial``: engines never run dry; a rollout ends with its last wanted response, and what is
    unfinished is carried.
    """
    engines = [_Engine(costs) for _ in range(costs.engines)]
    found = []
    carried = 0
    for _ in range(steps):
        step = Step()
        if not partial:
            for index in range(responses):
                engines[index % costs.engines].waiting.append((next(draw), 0))
        judges = [0.0] * costs.judges
        busy = [0.0] * costs.engines
        queue = [
            (engine.refill(draw if partial else None), index)
            for index, engine in enumerate(engines)
        ]
        heapq.heapify(queue)
        for _ in range(responses):
            step.rollout, index = heapq.heappop(queue)
            step.trained += engines[index].finish_one(step)
            busy[index] = step.rollout
            heapq.heappush(judges, max(step.rollout, heapq.heappop(judges)) + costs.judge)
            heapq.heappush(queue, (engines[index].refill(draw if partial else None), index))
        for index, engine in enumerate(engines):
            busy[index] = step.rollout if engine.running else busy[index]
            engine.stop(step)
        step.engine_busy = sum(busy)
        step.judge_busy = costs.judge * responses
        step.judging = max(0.0, max(judges) - step.rollout)
        tokens = step.trained + responses * costs.prompt_tokens
        step.training = costs.train + costs.train_token * tokens
        step.transfer = costs.transfer
        step.save = costs.save
        assert step.generated + carried == step.trained + step.carried, (
            "tokens are neither lost nor made"
        )
        carried = step.carried
        found.append(step)
    return found


def one_step_off(steps: Sequence[Step]) -> list[Step]:
    """Return ``steps`` as they are where each batch trains beside the generation of the next one;
    one less.
    """
    return [
        replace(coming, training=now.training, trained=now.trained, beside=True)
        for now, coming in pairwise(steps)
    ]


def costs_of(plan: Plan, environment: Environment, times: int = 1) -> Costs:
    """Return the planner's rates as costs. ``times``: as many GPUs for the rollout alone."""
    engine = plan.engine
    rates = plan.rates
    config = plan.config
    arch = plan.arch
    size = engine.tensor_model_parallel_size
    gpus = plan.machine.gpus
    hbm = rates.hbm_gbps * 1e9
    per_second = size * rates.peak_tflops * 1e12 * rates.mfu
    prompt = config.data.max_prompt_length
    seconds = plan.seconds
    training = seconds.forward + seconds.update + seconds.tensor_parallel + seconds.context_parallel
    training += seconds.expert_parallel + seconds.pipeline
    interval = config.training.save_interval
    return Costs(
        engines=times * (plan.machine.engine_gpus or gpus) // size,
        slots=max(1, engine.concurrent),
        read=engine.weights / hbm,
        token=sequence_flops(
            arch=arch,
            layout=plan.layout,
            tokens=1,
            length=prompt,
        )
        / per_second,
        kv=engine.kv_per_token / hbm,
        prompt=sequence_flops(
            arch=arch,
            layout=plan.layout,
            tokens=prompt,
            length=prompt,
        )
        / per_second
        / config.rollout.group_size,
        prompt_tokens=prompt,
        judge=environment.judge_seconds,
        judges=environment.judges_per_node * -(-gpus // rates.gpus_per_node),
        train=seconds.data_parallel,
        train_token=training / plan.work.tokens,
        transfer=seconds.resharding,
        save=max(stage.saved for stage in plan.stages) / GB / environment.copy_gbps / interval
        if interval
        else 0.0,
    )


def read_lengths(path: str) -> list[int]:
    """Read whole numbers, one per line or separated by spaces. Raises :class:`UserError`."""
    try:
        lengths = [int(word) for word in Path(path).read_text().split()]
    except (OSError, ValueError) as error:
        raise UserError(
            f"--lengths {path}: {error}; it holds response lengths in tokens, whole numbers"
        ) from None
    if not lengths or min(lengths) < 1:
        raise UserError(f"--lengths {path}: needs at least one length, and none below 1")
    return lengths


def length_stream(lengths: Sequence[int], mean: int, most: int, seed: int) -> Iterator[int]:
    """Yield draws from ``lengths``, or from a log-normal of that ``mean``; at least 1, at most
    ``most``.
    """
    rng = np.random.default_rng(seed)
    while True:
        spread = math.log(mean) - SPREAD**2 / 2, SPREAD
        if lengths:
            drawn = rng.choice(lengths, 4096)
        else:
            drawn = rng.lognormal(*spread, 4096)
        yield from (int(length) for length in np.clip(np.rint(drawn), 1, most))


@dataclass(frozen=True)
class Scenario:
    """What was simulated, and its steps after the first."""

    name: str
    costs: Costs
    responses: int
    steps: tuple[Step, ...]

    def mean(self, part: str) -> float:
        return float(np.mean([getattr(step, part) for step in self.steps]))

    @property
    def shares(self) -> dict[str, float]:
        """Return how busy each resource is, of the whole step: at most 1. ``slots``: of the
        rollout's decoding positions.
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
    environment: Environment,
    lengths: Sequence[int] = (),
) -> list[Scenario]:
    """Return the run as configured; with partial rollouts; with twice the GPUs for the rollout; and
    of each kind the fastest that fits: the same GPUs divided into trainers and engines, one step
    off; all of them for both, where a server is configured; another layout. Raises
    :class:`UserError` without GPUs for a server.
    """
    if config.rollout.engine == "server" and not machine.engine_gpus:
        raise UserError(
            "--simulate of rollout.engine=server needs --gpus N --engine-gpus M: those that train "
            "and generate"
        )
    most = config.rollout.max_response_length
    if lengths:
        mean = round(float(np.mean(np.minimum(lengths, most))))
    else:
        mean = machine.response_tokens or -(-most // 3)
    machine = replace(machine, response_tokens=min(max(1, mean), most))
    responses = config.data.prompts_per_step * config.rollout.group_size

    def run(name: str, plan: Plan, times: int = 1, partial: bool = False) -> Scenario:
        draw = length_stream(
            lengths=lengths,
            mean=machine.response_tokens,
            most=most,
            seed=environment.seed,
        )
        costs = costs_of(plan, environment, times)
        steps = simulate(
            costs=costs,
            draw=draw,
            responses=responses,
            steps=STEPS,
            partial=partial,
        )
        if plan.config.rollout.async_steps:
            counted = one_step_off(steps)
        else:
            counted = steps[1:]
        return Scenario(
            name=name,
            costs=costs,
            responses=responses,
            steps=tuple(counted),
        )

    plan = make_plan(config, machine, rates)
    found = [run("as configured", plan)]
    if config.rollout.engine != "server":
        found.append(run("partial rollouts", plan, partial=True))
    found.append(run("twice the GPUs for the rollout", plan, times=2))
    for others in (
        _splits(config, machine, rates),
        _colocated(plan),
        _other_layouts(config, machine),
    ):
        ran = [run(name, other) for name, other in _fitting(others, rates)]
        found += sorted(ran, key=lambda scenario: scenario.mean("seconds"))[:1]
    return found


_Named = Iterator[tuple[str, Config, Machine]]


def _fitting(others: _Named, rates: Rates) -> Iterator[tuple[str, Plan]]:
    for name, config, machine in others:
        try:
            plan = make_plan(config, machine, rates)
        except UserError:
            continue
        longest = config.data.max_prompt_length + config.rollout.max_response_length
        engine = plan.engine  # of a server: the plan's verdict is on the trainers alone
        holds_one = engine.kv_cache >= longest * engine.kv_per_token
        if (
            plan.fits
            and holds_one
            and engine.weights + engine.kv_cache <= machine.gpu_memory_gb * GB
        ):
            yield name, plan


def _splits(config: Config, machine: Machine, rates: Rates) -> _Named:
    """Yield every division of the GPUs, in whole nodes where there are several; the engines have
    theirs alone.
    """
    gpus = machine.gpus + machine.engine_gpus
    unit = rates.gpus_per_node if gpus > rates.gpus_per_node else 1
    memory = max(ALONE, config.rollout.gpu_memory_utilization)
    rollout = replace(config.rollout, engine="server", async_steps=1, gpu_memory_utilization=memory)
    for trainers in range(unit, gpus, unit):
        split = replace(machine, gpus=trainers, engine_gpus=gpus - trainers)
        yield (
            f"one step off, {trainers} + {gpus - trainers}",
            replace(config, rollout=rollout),
            split,
        )


def _colocated(plan: Plan) -> _Named:
    """Yield a server's GPUs and the trainers' as one, which take turns and leave an engine more or
    less memory.
    """
    gpus = plan.machine.gpus + plan.machine.engine_gpus
    config = plan.config
    machine = replace(plan.machine, gpus=gpus, engine_gpus=0)
    size = plan.engine.tensor_model_parallel_size
    rollout = replace(config.rollout, engine="vllm", async_steps=0, tensor_model_parallel_size=size)
    training = replace(config.training, offload_optimizer_during_rollout=True)
    for memory in (0.9, 0.8, 0.7, 0.6, 0.5) if plan.machine.engine_gpus else ():
        engines = replace(rollout, gpu_memory_utilization=memory)
        yield (
            f"colocated on {gpus} GPUs",
            replace(config, rollout=engines, training=training),
            machine,
        )


def _other_layouts(config: Config, machine: Machine) -> _Named:
    parallel = config.parallel
    now = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size)
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4, 8):
            sizes: dict[str, Any] = {
                "tensor_model_parallel_size": tp,
                "pipeline_model_parallel_size": pp,
            }
            dropped: tuple[str, ...] = ("virtual_pipeline_model_parallel_size",)
            if pp != now[1]:  # what divides the layers unevenly is written for so many stages
                dropped = (*UNEVEN_PIPELINE, "virtual_pipeline_model_parallel_size")
            sizes["megatron"] = {
                name: value for name, value in parallel.megatron.items() if name not in dropped
            }
            sizes["sequence_parallel"] = tp > 1
            if (tp, pp) != now:
                yield (
                    f"TP {tp} x PP {pp}",
                    replace(config, parallel=replace(parallel, **sizes)),
                    machine,
                )


def waits(scenario: Scenario) -> dict[str, float]:
    """Return which resource waits for which, seconds of a step."""
    idle = scenario.mean("rollout") - scenario.mean("engine_busy") / scenario.costs.engines
    beside = scenario.steps[0].beside
    return {
        "engines wait for the longest responses": idle,
        "engines wait for the training": scenario.mean("engines_wait"),
        "trainers wait for the rollout": scenario.mean("trainers_wait"),
        f"{'engines' if beside else 'all'} wait for the last verdicts": scenario.mean("judging"),
        "all wait for the weight transfer": scenario.mean("transfer"),
        f"{'trainers' if beside else 'all'} wait for checkpoints": scenario.mean("save"),
    }


PARTS = ("seconds", "rollout", "judging", "training", "transfer", "save")


def scenario_facts(found: Sequence[Scenario]) -> list[dict[str, Any]]:
    """Return plain data: seconds of a step and its parts, shares of resources, waits, tokens."""
    return [
        {
            "scenario": one.name,
            **{part: one.mean(part) for part in PARTS},
            "busy": one.shares,
            "waits": waits(one),
            "tokens": one.mean("trained"),
            "engines": one.costs.engines,
            "slots": one.costs.slots,
        }
        for one in found
    ]


def scenario_lines(
    found: Sequence[Scenario], rates: Rates, environment: Environment, lengths: str | None
) -> list[str]:
    """Return a table of the scenarios, what waits in the first and one step off, the assumptions."""
    lines = [
        f"{'seconds of a step':32}"
        + "".join(f"{part:>10}" for part in ("total", *PARTS[1:]))
        + "   busy: engines, their slots, judges, trainers"
    ]
    for one in found:
        numbers = "".join(f"{one.mean(part):10.2f}" for part in PARTS)
        lines.append(
            f"{one.name:32}{numbers}   "
            + " ".join(f"{share:6.0%}" for share in one.shares.values())
        )
    for one in (found[0], *(one for one in found if one.name.startswith("one step off"))):
        ordered = sorted(waits(one).items(), key=lambda item: -item[1])
        total = one.mean("seconds")
        waiting = "; ".join(
            f"{what} {seconds:.2f} s ({seconds / total:.0%})" for what, seconds in ordered
        )
        lines.append(f"{one.name[0].upper()}{one.name[1:]}: {waiting}")
    costs = found[0].costs
    if lengths:
        drawn = f"lengths drawn from {lengths}"
    else:
        drawn = f"log-normal lengths, sigma {SPREAD:g}"
    mean = found[0].mean("trained") / found[0].responses
    lines.append(
        f"Assumed: {drawn}, mean {mean:.0f} tokens; {costs.engines} engines of {costs.slots} "
        "sequences, responses dealt in "
        f"turn; {rates.peak_tflops:g} TFLOP/s at {rates.mfu:.0%} and {rates.hbm_gbps:g} GB/s per "
        "GPU; "
        f"{environment.judge_seconds:g} s per verdict, {costs.judges} at a time, while the rest "
        "is generated; checkpoints "
        f"block for a copy at {environment.copy_gbps:g} GB/s; engines and trainers take turns on "
        "the same GPUs, except "
        f"for a server's and one step off (trainers + engines, with {ALONE:.0%} of their memory): "
        "those get all weights "
        "by NCCL; partial rollouts carry what is unfinished, however old."
    )
    return lines
