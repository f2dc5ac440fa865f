"""The bytes that one rank sends in a step."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config import Config
from megatron_dcpo.planning.memory import State, expert_replicas, recomputed_share
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.pipeline import layers_per_stage, sums_of_stages


@dataclass(frozen=True)
class Work:
    """The work of one step.

    tokens: prompt and response tokens of all responses.
    length: the tokens of one prompt and response; ``response_length`` is the response's part.
    micro_batches: of one rank in a pass over the whole rollout.
    forward_passes: passes without gradient over all tokens.
    """

    tokens: int
    length: int
    response_length: int
    micro_batches: int
    forward_passes: int
    updates: int


@dataclass(frozen=True)
class BytesSent:
    """The bytes that the busiest rank sends in a step."""

    data_parallel: int
    tensor_parallel: int
    context_parallel: int
    expert_parallel: int
    pipeline: int


def step_traffic(
    arch: Architecture, layout: Layout, config: Config, replicas: int, state: State, work: Work
) -> BytesSent:
    """Return the bytes that a rank sends in a step.

    Collectives are rings: an all-gather or reduce-scatter of n bytes over r ranks sends (r - 1) / r
    * n, an all-reduce twice that. ``state`` is that of the rank with the most gradients, which are
    sent in fp32. ``replicas`` is data- times context-parallel size.
    """
    tp = layout.tensor_model_parallel_size
    parallel = config.parallel
    b = dtype_bytes(config.model.params_dtype)
    passes = work.forward_passes
    layers = max(layers_per_stage(arch.num_layers, layout))
    repeated = 0.0
    if parallel.recompute_granularity == "full":
        repeated = recomputed_share(arch, layout, config)
    tokens = work.tokens / replicas  # of a rank and the ranks with which it shares its layers
    hidden = tokens * arch.hidden_size * b

    dense = state.buffer_numel - state.expert_numel
    expert_copies = expert_replicas(layout, replicas)
    shared = (
        dense * (replicas - 1) / replicas + state.expert_numel * (expert_copies - 1) / expert_copies
    )
    per_number = 8
    if parallel.use_distributed_optimizer and not config.frozen:  # an adapter is fp32
        per_number = 4 + b

    # There are two pairs of linear layers in a layer, or one and the experts, unless there is a
    # shared one among these. In each direction a pair has an all-reduce, or an all-gather and a
    # reduce-scatter, which send as many bytes. Sequence parallelism gathers the inputs again for
    # the gradient of the weights, unless these are frozen.
    ring = (tp - 1) / tp * hidden
    has_experts = [int(arch.has_experts(layer)) for layer in range(arch.num_layers)]
    with_experts = max(sums_of_stages(has_experts, layout))
    pairs = 2 * layers
    if not arch.shared_ffn_hidden_size:
        pairs -= with_experts
    forward = 2 * ring * pairs
    gathers_again = parallel.sequence_parallel and not config.frozen
    backward = (3 if gathers_again else 2) * ring * pairs
    ends = 2 * ring  # the embedding's output and the gradient in the output layer's input
    tensor = passes * (forward + ends) + forward * (1 + repeated) + backward + 2 * ends

    pipeline = 0.0
    if layout.pipeline_model_parallel_size > 1:
        boundary = hidden / (tp if parallel.sequence_parallel else 1)
        boundary = boundary * layout.virtual_pipeline_model_parallel_size
        pipeline = boundary * (passes + 2)

    # Keys and values go once around the context-parallel ranks, on the way back with their
    # gradients.
    others = parallel.context_parallel_size - 1
    around = others * tokens * 2 * arch.num_query_groups // tp * arch.kv_channels * b
    context = around * layers * (passes + 3 + repeated)

    # A token goes to its experts and back, and there to all ranks of an expert.
    ep = layout.expert_model_parallel_size
    etp = layout.expert_tensor
    away = arch.experts_per_token * hidden / tp * ((ep - 1) / ep + etp - 1)
    experts = 2 * away * with_experts * (passes + 2 + repeated)
    return BytesSent(
        data_parallel=int(work.updates * (shared * per_number)),
        tensor_parallel=int(tensor),
        context_parallel=int(context),
        expert_parallel=int(experts),
        pipeline=int(pipeline),
    )
