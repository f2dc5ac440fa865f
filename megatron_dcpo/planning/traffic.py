"""Bytes that one rank sends in a step, the arithmetic of a step, and a step time from stated peak
rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcpo.config import Config
from megatron_dcpo.planning.memory import State, expert_replicas, recomputed_share
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.pipeline import layers_per_stage
from megatron_dcpo.weights.planner import padded_vocab_size


@dataclass(frozen=True)
class Rates:
    """What the estimate assumes of the machine: dense bf16 TFLOP/s and the share of it reached
    (``mfu``), GB/s of memory, of a GPU's link within its node and to other nodes. The defaults are
    an H100's.
    """

    peak_tflops: float = 989.0
    mfu: float = 0.4
    hbm_gbps: float = 3350.0
    nvlink_gbps: float = 450.0
    link_gbps: float = 50.0
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Work:
    """One step's work. ``tokens``: prompt and response tokens of all responses; ``length``: of one;
    ``micro_batches``: per rank and pass over the whole rollout; ``forward_passes``: without
    gradient, over all tokens.
    """

    tokens: int
    length: int
    response_length: int
    micro_batches: int
    forward_passes: int
    updates: int


@dataclass(frozen=True)
class BytesSent:
    """Bytes that the busiest rank sends per step."""

    data_parallel: int
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    pipeline: int


@dataclass(frozen=True)
class Seconds:
    """A step's parts. Communication is counted in full, as if nothing overlapped."""

    rollout: float
    forward: float
    update: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    data_parallel: float
    pipeline: float
    resharding: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def beside(self) -> float:
        """Return the seconds of a step whose generation runs beside the training
        (``rollout.async_steps``).
        """
        return max(self.rollout, self.total - self.rollout - self.resharding) + self.resharding


def step_traffic(
    arch: Architecture, layout: Layout, config: Config, replicas: int, state: State, work: Work
) -> BytesSent:
    """Return the bytes that a rank sends in a step. Ring collectives: an all-gather or
    reduce-scatter of n bytes over r ranks sends (r - 1) / r * n, an all-reduce twice that.
    ``state``: of the rank with most gradients, which are sent in fp32. ``replicas``: data- times
    context-parallel size.
    """
    tp = layout.tensor_model_parallel_size
    pp = layout.pipeline_model_parallel_size
    parallel = config.parallel
    b = dtype_bytes(config.model.params_dtype)
    numel = state.buffer_numel - state.expert_numel
    of_experts = expert_replicas(layout, replicas)
    shared = numel * (replicas - 1) / replicas + state.expert_numel * (of_experts - 1) / of_experts
    per_update = shared * ((4 + b) if parallel.use_distributed_optimizer else 8)
    tokens = work.tokens / replicas  # of a rank and those it shares its layers with
    hidden = tokens * arch.hidden_size * b
    ring = (tp - 1) / tp * hidden
    layers = max(layers_per_stage(arch.num_layers, layout))
    # Two linear pairs per layer, one beside experts. Each way an all-reduce, or an all-gather and a
    # reduce-scatter: the same bytes; sequence parallelism gathers the pairs' inputs once more for
    # the gradient of the weights.
    pairs = layers * (1 if arch.num_experts else 2)
    forward = 2 * ring * pairs
    backward = (3 if parallel.sequence_parallel else 2) * ring * pairs
    repeated = recomputed_share(arch, layout, config) * (parallel.recompute_granularity == "full")
    ends = 2 * ring  # the embedding's output and the output layer's input gradient
    passes = work.forward_passes
    tensor = passes * (forward + ends) + forward * (1 + repeated) + backward + 2 * ends
    boundary = (
        hidden
        / (tp if parallel.sequence_parallel else 1)
        * layout.virtual_pipeline_model_parallel_size
    )
    pipeline = boundary * (passes + 2) if pp > 1 else 0.0
    # Keys and values go once around the context-parallel ranks, on the way back with their
    # gradients.
    around = (
        (parallel.context_parallel_size - 1)
        * tokens
        * 2
        * arch.num_query_groups
        // tp
        * arch.kv_channels
        * b
    )
    context = around * layers * (passes + 3 + repeated)
    # A token goes to its experts and back, there to all ranks of an expert.
    ep = layout.expert_model_parallel_size
    etp = layout.expert_tensor
    away = arch.experts_per_token * hidden / tp * ((ep - 1) / ep + etp - 1)
    experts = 2 * away * layers * (passes + 2 + repeated)
    return BytesSent(
        data_parallel=int(work.updates * per_update),
        tensor_parallel=int(tensor),
        context_parallel=int(context),
        expert_parallel=int(experts),
        pipeline=int(pipeline),
    )


def forward_flops(arch: Architecture, layout: Layout, work: Work) -> float:
    """Return the multiply-adds, counted twice, of one forward pass over all tokens of a step;
    attention is causal.
    """
    return sequence_flops(
        arch=arch,
        layout=layout,
        tokens=work.tokens,
        length=work.length,
    )


def sequence_flops(arch: Architecture, layout: Layout, tokens: int, length: float) -> float:
    """Return the same for ``tokens`` in sequences of ``length``."""
    per_layer, output = _flops_per_token(arch, layout, length)
    return tokens * (arch.num_layers * per_layer + output)


def slowest_stage(arch: Architecture, layout: Layout, length: float) -> float:
    """Work of the pipeline stage that has most, the output layer counted, over the mean of the
    stages.
    """
    per_layer, output = _flops_per_token(arch, layout, length)
    work = [layers * per_layer for layers in layers_per_stage(arch.num_layers, layout)]
    work[-1] += output
    return max(work) * len(work) / sum(work)


def _flops_per_token(arch: Architecture, layout: Layout, length: float) -> tuple[float, float]:
    """Return the operations per token of a layer and of the output layer."""
    d = arch.kv_channels
    q = arch.num_attention_heads * d
    k = arch.num_query_groups * d
    h = arch.hidden_size
    f = arch.ffn_hidden_size
    # the last term: scores and values over half the length
    if arch.num_experts:
        mlp = 3 * h * f * arch.experts_per_token + h * arch.num_experts
    else:
        mlp = 3 * h * f
    per_layer = 2 * (h * (q + 2 * k) + q * h + mlp) + 2 * q * length
    return per_layer, 2 * h * padded_vocab_size(arch, layout)


def step_seconds(
    arch: Architecture,
    layout: Layout,
    config: Config,
    gpus: int,
    work: Work,
    traffic: BytesSent,
    resharding: int,
    engine_weights: int,
    engine_kv: int,
    concurrent: int,
    responses_per_engine: int,
    engine_gpus: int,
    rates: Rates,
) -> Seconds:
    """Estimate the seconds of a step. ``engine_weights``: bytes per engine rank; ``engine_kv``:
    bytes per token and rank; ``concurrent``: sequences an engine decodes at once; ``engine_gpus``:
    of engines beside the ``gpus``.

    A rollout reads the engine's weights and the running sequences' keys and values once per token
    position; a training pass computes at ``mfu`` of the peak and waits for the slowest stage and
    for the pipeline to fill, (PP - 1) / (micro-batches x VPP) of its time.
    """
    tp = layout.tensor_model_parallel_size
    pp = layout.pipeline_model_parallel_size
    cp = config.parallel.context_parallel_size
    per_second = gpus * rates.peak_tflops * 1e12 * rates.mfu
    # micro_batches covers all updates of a step; the pipeline fills once for each.
    bubble = 1 + (pp - 1) * work.updates / (
        work.micro_batches * layout.virtual_pipeline_model_parallel_size
    )
    forward = (
        forward_flops(arch, layout, work)
        / per_second
        * bubble
        * slowest_stage(arch, layout, work.length)
    )
    # forward, gradients of activations, gradients of weights (not of frozen ones)
    factor = 3 - config.frozen + recomputed_share(arch, layout, config)
    rounds = -(-responses_per_engine // max(1, concurrent))
    at_once = min(concurrent, responses_per_engine)
    context = work.length - work.response_length / 2
    read = rounds * work.response_length * (engine_weights + at_once * context * engine_kv)
    within = rates.nvlink_gbps * 1e9
    link = rates.link_gbps * 1e9
    across = within if gpus <= rates.gpus_per_node else link
    reshards = gpus + engine_gpus if engine_gpus else layout.width * pp
    return Seconds(
        rollout=read / (rates.hbm_gbps * 1e9)
        + forward_flops(arch, layout, work) / per_second * gpus / (engine_gpus or gpus),
        forward=work.forward_passes * forward,
        update=factor * forward,
        tensor_parallel=traffic.tensor_parallel / (within if tp <= rates.gpus_per_node else across),
        context_parallel=traffic.context_parallel
        / (within if tp * cp <= rates.gpus_per_node else across),
        expert_parallel=traffic.expert_parallel
        / (within if layout.width <= rates.gpus_per_node else across),
        data_parallel=traffic.data_parallel / across,
        pipeline=traffic.pipeline / across,
        resharding=resharding / (within if reshards <= rates.gpus_per_node else link),
    )
