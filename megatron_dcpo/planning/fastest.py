"""``dcpo plan --fastest``: the layouts of a run that fit, by the time of a step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from megatron_dcpo.config import Config
from megatron_dcpo.errors import UserError
from megatron_dcpo.planning.machine import GB, Machine, Rates
from megatron_dcpo.planning.plan import Plan, make_plan
from megatron_dcpo.weights.layout import UNEVEN_PIPELINE

SIZES = (1, 2, 4, 8)
_RECOMPUTED: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Alternative:
    """A layout that fits, and its plan. ``options`` are what a configuration needs to say for it,
    as words of the command line.
    """

    options: tuple[str, ...]
    plan: Plan


def fastest(config: Config, machine: Machine, rates: Rates, most: int = 5) -> list[Alternative]:
    """Return the fastest of the settings that fit, at most so many: every tensor- and
    pipeline-parallel size, kind of recomputation and size of an engine, with the rest of ``config``
    as it is. What a plan counts as free (the distributed optimizer, sequence parallelism, an
    optimizer that is off the GPU during a rollout) is on.
    """
    found = []
    for layout in layouts(config):
        for recomputed, size in itertools.product(_RECOMPUTED, _engine_sizes(config)):
            changed = replace(
                layout,
                parallel=replace(
                    layout.parallel,
                    recompute_granularity=recomputed,
                    use_distributed_optimizer=True,
                ),
                rollout=replace(layout.rollout, tensor_model_parallel_size=size),
                training=replace(layout.training, offload_optimizer_during_rollout=True),
            )
            try:
                plan = make_plan(changed, machine, rates)
            except UserError:  # it does not divide the model, or the GPUs
                continue
            if plan.fits:
                found.append(Alternative(options=_options(config, changed), plan=plan))
    # of equal ones the one with less to change
    return sorted(found, key=lambda one: (round(one.plan.step, 2), len(one.options)))[:most]


def layouts(config: Config) -> Iterator[Config]:
    """Yield ``config`` with every tensor- and pipeline-parallel size."""
    parallel = config.parallel
    for tp, pp in itertools.product(SIZES, SIZES):
        dropped = []
        if tp != parallel.tensor_model_parallel_size or pp != parallel.pipeline_model_parallel_size:
            dropped.append("virtual_pipeline_model_parallel_size")
        if pp != parallel.pipeline_model_parallel_size:
            dropped += UNEVEN_PIPELINE  # written for a certain number of stages
        megatron = {}
        for name, value in parallel.megatron.items():
            if name not in dropped:
                megatron[name] = value
        other = replace(
            parallel,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            sequence_parallel=tp > 1,
            megatron=megatron,
        )
        yield replace(config, parallel=other)


def _engine_sizes(config: Config) -> tuple[int, ...]:
    if config.rollout.engine == "transformers":
        return (1,)
    return SIZES


def _options(config: Config, changed: Config) -> tuple[str, ...]:
    """Return what differs between two configurations, of what is tried here."""
    tried = {
        "parallel": (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "sequence_parallel",
            "use_distributed_optimizer",
            "recompute_granularity",
        ),
        "rollout": ("tensor_model_parallel_size",),
        "training": ("offload_optimizer_during_rollout",),
    }
    options = []
    for section, names in tried.items():
        for name in names:
            value = getattr(getattr(changed, section), name)
            if value != getattr(getattr(config, section), name):
                options.append(f"{section}.{name}={str(value).lower()}")
    before = config.parallel.megatron
    for name in before.keys() - changed.parallel.megatron.keys():
        options.append(f"parallel.megatron.{name}=null")
    return tuple(options)


def fastest_lines(alternatives: list[Alternative], configured: Plan) -> list[str]:
    """Return a table of alternatives below the plan as it is configured."""
    lines = [
        f"{'seconds of a step':<26}{'range':>14}{'GB':>8}  layout, and what to change",
        _line(configured, "as configured" + ("" if configured.fits else ", which does not fit")),
    ]
    for one in alternatives:
        lines.append(_line(one.plan, " ".join(one.options) or "as configured"))
    if not alternatives:
        lines.append("nothing that was tried fits")
    return lines


def _line(plan: Plan, words: str) -> str:
    layout = plan.layout
    least, most = plan.step_range
    name = (
        f"TP {layout.tensor_model_parallel_size} x PP {layout.pipeline_model_parallel_size}, "
        f"engine TP {plan.engine.tensor_model_parallel_size}, recomputation "
        f"{plan.config.parallel.recompute_granularity}"
    )
    seconds = f"{least:.0f} to {most:.0f}"
    return f"{plan.step:<26.1f}{seconds:>14}{plan.peak / GB:>8.1f}  {name}: {words}"
