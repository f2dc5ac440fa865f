"""The time of a step, from rates of the machine.

Six of the rates are fitted to published steps (docs/plan.md#against-published-steps); the others
are what a machine's data sheet says.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config import Config
from megatron_dcpo.planning.decoding import DecodingSteps, decoding_costs
from megatron_dcpo.planning.engine_memory import EngineMemory
from megatron_dcpo.planning.machine import Machine, Rates
from megatron_dcpo.planning.memory import recomputed_share
from megatron_dcpo.planning.traffic import BytesSent, Work
from megatron_dcpo.weights.arithmetic import Operations, operations_per_token
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.pipeline import sums_of_stages


@dataclass(frozen=True)
class StepLoad:
    """Everything in a step that takes time: arithmetic, generation, the bytes that the busiest rank
    sends, and the bytes that it receives when the engine gets new weights.
    """

    work: Work
    engine: EngineMemory
    decoding: DecodingSteps
    traffic: BytesSent
    resharding: int


@dataclass(frozen=True)
class Seconds:
    """A step's parts. Communication is counted in full, as if nothing overlapped. ``changeover`` is
    what it takes to change between training and generation on the same GPUs, ``teacher`` the pass
    of a teacher without its communication.
    """

    rollout: float
    forward: float
    update: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    data_parallel: float
    pipeline: float
    resharding: float
    changeover: float
    teacher: float = 0.0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def beside(self) -> float:
        """Return the seconds of a step in which generation runs alongside training
        (``rollout.max_staleness`` with a server).
        """
        return max(self.rollout, self.total - self.rollout - self.resharding) + self.resharding


def step_seconds(
    arch: Architecture,
    layout: Layout,
    config: Config,
    load: StepLoad,
    machine: Machine,
    rates: Rates,
) -> Seconds:
    """Estimate the seconds of a step.

    A training pass waits for the slowest stage, and for the pipeline to fill, (PP - 1) /
    (micro-batches x VPP) of its time.
    """
    work = load.work
    traffic = load.traffic
    gpus = machine.gpus
    tp = layout.tensor_model_parallel_size
    pp = layout.pipeline_model_parallel_size
    forward = pass_seconds(arch, layout, work, machine, rates)
    # forward, gradients of activations, gradients of the weights unless they are frozen
    factor = 3 - config.frozen + recomputed_share(arch, layout, config)
    across = rates.bytes_per_second(gpus)
    within = rates.nvlink_gbps * 1e9

    def link(ranks: int) -> float:
        if ranks <= rates.gpus_per_node:
            return within
        return across

    if machine.engine_gpus:
        resharding_ranks = gpus + machine.engine_gpus
    else:
        resharding_ranks = layout.width * pp
    return Seconds(
        rollout=load.decoding.seconds(decoding_costs(arch, load.engine, rates)),
        forward=work.forward_passes * forward,
        update=factor * forward,
        tensor_parallel=traffic.tensor_parallel / link(tp),
        context_parallel=traffic.context_parallel
        / link(tp * config.parallel.context_parallel_size),
        expert_parallel=traffic.expert_parallel / link(layout.width),
        data_parallel=traffic.data_parallel / across,
        pipeline=traffic.pipeline / across,
        resharding=load.resharding / rates.bytes_per_second(resharding_ranks),
        changeover=0.0 if load.engine.kind == "server" else rates.changeover_seconds,
    )


def pass_seconds(
    arch: Architecture, layout: Layout, work: Work, machine: Machine, rates: Rates
) -> float:
    """Return the seconds of a forward pass of ``arch`` over the tokens of a step, which waits for
    the slowest stage and for the pipeline to fill.
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    # micro_batches is the number for all updates of a step; the pipeline fills once for each.
    bubble = 1 + (pp - 1) * work.updates / (work.micro_batches * vp)
    operations = operations_per_token(arch, layout, work.length)
    ideal = work.tokens / (machine.gpus * rates.peak_tflops * 1e12)
    return ideal * pp * slowest_stage(operations, layout, rates) * bubble


def slowest_stage(operations: Operations, layout: Layout, rates: Rates) -> float:
    """Return the seconds, times the peak operations of a GPU per second, that a token takes in the
    pipeline stage that has most to do, the last one with the output layer.
    """
    dense = [*sums_of_stages(operations.dense, layout)]
    dense[-1] += operations.output
    experts = sums_of_stages(operations.experts, layout)
    return max(
        of_dense / rates.mfu + of_experts / rates.expert_mfu
        for of_dense, of_experts in zip(dense, experts, strict=True)
    )
