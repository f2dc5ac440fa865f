"""Weights, gradients and optimizer state of a pipeline stage, as Megatron lays them out. Exact:
counted parameter by parameter, with the padding of the distributed optimizer's buffers.

What the backward pass keeps of a micro-batch: bytes per token, operator by operator.

Two layer specs, two formulas. ``local`` is ``policy/layers.py`` (fp32 norms, ungrouped products,
every operator keeps its own input); it is measured. ``transformer_engine`` keeps less: its fused
linears hold a norm's input and output once, its fused SwiGLU holds only its input; it follows the
fused operators' definitions.

Symbols, per rank: h hidden size, q and k the widths of queries and keys, f the MLP's width, b bytes
per number, t tokens. Under sequence parallelism a rank has t / TP tokens between the linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dcpo.config import Config
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.pipeline import chunk_layers, layers_per_stage
from megatron_dcpo.weights.planner import interleavings, padded_vocab_size, plan
from megatron_dcpo.weights.table import adapted, hf_shapes

PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # numbers; the distributed optimizer's buffers
LOGITS_AT_ONCE = (
    1 << 26
)  # of a chunk on a GPU: policy/output_layer.py, which planning does not import
# Tied, on the first and the last pipeline stage: a bucket of its own.
_SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class State:
    """Bytes of one rank, all its model chunks together. ``numel``: its parameters, padding and
    adapter not counted; ``buffer_numel``: the gradient buffers' length, ``expert_numel`` of it
    experts' that other ranks have others of; ``shard_numel``: parameters of which it holds the
    optimizer state.
    """

    numel: int
    buffer_numel: int
    expert_numel: int
    shard_numel: int
    weights: int
    gradients: int
    main_params: int
    moments: int
    adapter: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.main_params + self.moments + self.adapter


def adapter_bytes(arch: Architecture, layout: Layout, config: Config, stage: int) -> int:
    """Return the bytes of parameters, gradients and moments in fp32 of a pipeline stage's adapter,
    which every rank has whole.
    """
    adapter = config.model.adapter
    shapes = hf_shapes(arch)
    if adapter is None:
        return 0
    numbers = sum(adapter.rank * sum(shapes[name]) for name in adapted(arch, adapter.targets))
    return 16 * numbers * layers_per_stage(arch.num_layers, layout)[stage] // arch.num_layers


def expert_replicas(layout: Layout, data_parallel: int) -> int:
    """Return how many ranks of a stage hold the same experts, of ``data_parallel`` that hold the
    same of the rest.
    """
    ranks = layout.tensor_model_parallel_size * data_parallel
    return ranks // (layout.expert_model_parallel_size * layout.expert_tensor)


def stage_state(
    arch: Architecture, layout: Layout, config: Config, stage: int, data_parallel: int
) -> State:
    """Return the state of a rank of pipeline ``stage``; with the distributed optimizer, of the one
    with the largest shard. Of a frozen policy there are weights and an adapter, whose gradients are
    all that is reduced.
    """
    itemsize = dtype_bytes(config.model.params_dtype)
    parallel = config.parallel
    numel = 0
    lengths = [0, 0]
    shards = [[0] * data_parallel, [0] * expert_replicas(layout, data_parallel)]
    for virtual in range(layout.virtual_pipeline_model_parallel_size):
        sizes = parameter_sizes(
            arch,
            layout,
            Coordinates(
                tensor=0,
                pipeline=stage,
                virtual=virtual,
            ),
        )
        numel += sum(size for _, size in sizes)
        bucketing = parallel.overlap_grad_reduce and stage == 0 and virtual == 0
        if bucketing:
            bucket_size = max(40_000_000, 1_000_000 * data_parallel)
        else:
            bucket_size = None
        if arch.tied_embeddings and layout.pipeline_model_parallel_size > 1:
            shared = _SHARED
        else:
            shared = ()
        for experts in (False, True):  # divided over ranks, they have buffers of their own
            apart = layout.expert_model_parallel_size > 1
            own = [
                (size, name in shared)
                for name, size in sizes
                if (apart and ".experts." in name) == experts
            ]
            if not parallel.use_distributed_optimizer:
                lengths[experts] += sum(size for size, _ in own)
                shards[experts][0] += sum(size for size, _ in own)
                continue
            for bucket in _buckets(own, len(shards[experts]), bucket_size):
                lengths[experts] += bucket.length
                for rank, numel_of_rank in enumerate(_numel_per_rank(bucket, len(shards[experts]))):
                    shards[experts][rank] += numel_of_rank
    adapter = adapter_bytes(
        arch=arch,
        layout=layout,
        config=config,
        stage=stage,
    )
    if config.frozen:
        return State(
            numel=numel,
            buffer_numel=adapter // 16,
            expert_numel=0,
            shard_numel=0,
            weights=itemsize * numel,
            gradients=0,
            main_params=0,
            moments=0,
            adapter=adapter,
        )
    buffer_numel = sum(lengths)
    shard = sum(map(max, shards))
    padded = buffer_numel if parallel.use_distributed_optimizer else numel
    return State(
        numel=numel,
        buffer_numel=buffer_numel,
        expert_numel=lengths[True],
        shard_numel=shard,
        weights=itemsize * padded,
        gradients=4 * buffer_numel,
        main_params=4 * shard if itemsize == 2 else 0,
        moments=8 * shard,
        adapter=adapter,
    )


def parameter_sizes(arch: Architecture, layout: Layout, at: Coordinates) -> list[tuple[str, int]]:
    """Return (name, numbers) of every parameter of a model chunk on one rank, in the model's order."""
    shapes = hf_shapes(arch)
    kinds = interleavings(arch, layout, at)
    sizes = dict.fromkeys(kinds, 0)
    for copy in plan(arch, layout, at):
        shape = shapes[copy.hf]
        if kinds[copy.megatron] == "vocab":
            rows = padded_vocab_size(arch, layout) // layout.tensor_model_parallel_size
            sizes[copy.megatron] = rows * shape[1]
        else:
            sizes[copy.megatron] += copy.length * math.prod(shape) // shape[copy.dim]
    return list(sizes.items())


@dataclass(frozen=True)
class _Bucket:
    """A stretch of the gradient buffer: ``params`` are (start, stop) within it."""

    length: int
    params: tuple[tuple[int, int], ...]


def _buckets(
    sizes: Sequence[tuple[int, bool]], data_parallel: int, bucket_size: int | None
) -> Iterator[_Bucket]:
    """Return buckets as Megatron's ``_ParamAndGradBuffer`` makes them: parameters from last to
    first, each aligned, buckets aligned at their end.

    ``sizes``: (numbers, whether the parameter is the shared embedding).
    """
    alignment = math.lcm(data_parallel, BUCKET_ALIGNMENT)
    params: list[tuple[int, int]] = []
    position = 0
    for size, shared in reversed(sizes):
        position = -(-position // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        if shared and params:
            yield _Bucket(-(-position // alignment) * alignment, tuple(params))
            params = []
            position = 0
        params.append((position, position + size))
        position += size
        if shared or (bucket_size is not None and position >= bucket_size):
            yield _Bucket(-(-position // alignment) * alignment, tuple(params))
            params = []
            position = 0
    if params:
        yield _Bucket(-(-position // alignment) * alignment, tuple(params))


def _numel_per_rank(bucket: _Bucket, ranks: int) -> list[int]:
    """Return the numbers of the bucket's parameters in each data-parallel rank's equal part of it."""
    part = bucket.length // ranks
    numels = [0] * ranks
    for start, stop in bucket.params:
        for rank in range(start // part, (stop - 1) // part + 1):
            numels[rank] += min(stop, (rank + 1) * part) - max(start, rank * part)
    return numels


@dataclass(frozen=True)
class Widths:
    """Sizes of one rank. ``hidden`` is an average: under sequence parallelism a rank has one in TP
    tokens. ``routed``: inputs of MLPs per token; with experts an average too, which an uneven
    routing exceeds.
    """

    hidden: float
    routed: float
    queries: int
    keys: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    head_dim: int
    bytes: int


@dataclass(frozen=True)
class Activations:
    """Bytes at the peak of one rank: ``layers`` kept for the backward pass by all micro-batches in
    flight, ``logits``: the output layer's, on the last stage, ``working``: the largest transient of
    one layer's backward pass.
    """

    layers: int
    logits: int
    working: int
    in_flight: float

    @property
    def total(self) -> int:
        return self.layers + max(self.logits, self.working)


def widths(arch: Architecture, layout: Layout, config: Config) -> Widths:
    tp = layout.tensor_model_parallel_size
    etp = layout.expert_tensor
    return Widths(
        hidden=arch.hidden_size / (tp if config.parallel.sequence_parallel else 1),
        routed=arch.experts_per_token * etp / tp or 1.0,
        queries=arch.num_attention_heads * arch.kv_channels // tp,
        keys=arch.num_query_groups * arch.kv_channels // tp,
        heads=arch.num_attention_heads // tp,
        groups=arch.num_query_groups // tp,
        ffn=arch.ffn_hidden_size // etp,
        vocab=padded_vocab_size(arch, layout) // tp,
        head_dim=arch.kv_channels,
        bytes=dtype_bytes(config.model.params_dtype),
    )


def layer_bytes(arch: Architecture, layout: Layout, config: Config, recompute: str) -> float:
    """Return the bytes per token that one layer keeps under ``recompute`` (``none``, ``selective``:
    without what ``parallel.megatron.recompute_modules`` keep, ``full``: its input alone).
    """
    w = widths(arch, layout, config)
    b = w.bytes
    if recompute == "full":
        return b * w.hidden
    if layout.transformer_engine:
        kept = _transformer_engine(arch, w)
    else:
        kept = _local(arch, w)
    cp = config.parallel.context_parallel_size
    if (adapter := config.model.adapter) is not None:
        # A x of every projection; Transformer Engine's fused norm has no output, so the adapter
        # makes it again, in fp32
        kept += b * adapter.rank * len(adapter.targets)
        kept += 2 * 4 * w.hidden if layout.transformer_engine else 0
    if (
        cp > 1 and not layout.transformer_engine
    ):  # the keys and values of all ranks instead of the rank's keys
        kept += b * w.keys * (2 * cp - 1)
    if recompute == "selective":
        modules = config.parallel.recompute_modules
    else:
        modules = ()
    if "core_attn" in modules:
        # The checkpoint keeps q, k and v, which the attention would have kept anyway.
        kept -= 4 * w.heads + (0 if layout.transformer_engine else b * w.queries)
    if "mlp" in modules:
        # The checkpoint keeps the MLP's input; the local one's is counted with its norm,
        # Transformer Engine's has the norm.
        kept -= _mlp(w, layout.transformer_engine) + (
            b * w.hidden + 4 if layout.transformer_engine else 0
        )
    return kept + (_routing(arch, w, layout.transformer_engine) if arch.num_experts else 0)


def stage_layers_bytes(arch: Architecture, layout: Layout, config: Config, stage: int) -> float:
    """Return the same of all layers of a pipeline stage, as ``parallel.megatron.recompute_method``
    divides them.
    """
    parallel = config.parallel
    vp = layout.virtual_pipeline_model_parallel_size
    # of a model chunk, the stage's largest: of an uneven stage the schedule may hold it most often
    layers = max(
        map(
            len, chunk_layers(arch.num_layers, layout)[stage :: layout.pipeline_model_parallel_size]
        )
    )
    one = layer_bytes(
        arch=arch,
        layout=layout,
        config=config,
        recompute=parallel.recompute_granularity,
    )
    if parallel.recompute_granularity != "full":
        return vp * layers * one
    if parallel.recompute_method == "uniform":
        return vp * math.ceil(layers / parallel.recompute_num_layers) * one
    recomputed = min(layers, parallel.recompute_num_layers)
    return vp * (
        recomputed * one
        + (layers - recomputed)
        * layer_bytes(
            arch=arch,
            layout=layout,
            config=config,
            recompute="none",
        )
    )


def recomputed_share(arch: Architecture, layout: Layout, config: Config) -> float:
    """Return how much of a forward pass the backward pass repeats, roughly."""
    parallel = config.parallel
    if parallel.recompute_granularity == "none":
        return 0.0
    if parallel.recompute_granularity == "selective":
        return 0.1 * ("core_attn" in parallel.recompute_modules) + 0.6 * (
            "mlp" in parallel.recompute_modules
        )
    if parallel.recompute_method == "uniform":
        return 1.0
    chunks = chunk_layers(arch.num_layers, layout)
    return (
        sum(min(len(layers), parallel.recompute_num_layers) for layers in chunks) / arch.num_layers
    )


def _mlp(w: Widths, transformer_engine: bool) -> float:
    """Return the bytes of fc1's output and SwiGLU's; the local one: fc1's output, SiLU's, the
    linear half, their product.
    """
    return w.bytes * w.ffn * w.routed * (3 if transformer_engine else 5)


def _routing(arch: Architecture, w: Widths, transformer_engine: bool) -> float:
    """Return what experts keep besides: the router's scores and choices; per choice the permuted
    token, two indices and two weights; the local one keeps SwiGLU's output before it is weighted.
    """
    kept = w.bytes * (arch.hidden_size + (0 if transformer_engine else w.ffn)) + 24
    return w.routed * kept + 5 * arch.num_experts * w.hidden / arch.hidden_size


def _local(arch: Architecture, w: Widths) -> float:
    b = w.bytes
    q = w.queries
    k = w.keys
    norms = 2 * (
        (4 + 2 * b) * w.hidden + 4
    )  # fp32 input, normalized, scaled (the next linear's input); 1/rms
    qkv = b * (q + 2 * k)  # the projection's output, which the values point into
    qk_norms = 0
    if arch.qk_layernorm:
        regrouped = (
            w.heads != w.groups
        )  # queries of a group are copied out of the projection's output
        fp32_inputs = 4 * (q + k) if b == 2 else (4 * q if regrouped else 0)
        qk_norms = fp32_inputs + b * (q + k) + 4 * (w.heads + w.groups)
    rotary = 4 * b * w.head_dim  # cosine and sine, for queries and for keys
    attention = b * (q + k) + b * q + 4 * w.heads  # rotated queries and keys, output, log-sum-exp
    projection = b * q
    return norms + qkv + qk_norms + rotary + attention + projection + _mlp(w, False)


def _transformer_engine(arch: Architecture, w: Widths) -> float:
    b = w.bytes
    q = w.queries
    k = w.keys
    norms = 2 * (2 * b * w.hidden + 4)  # the norm's input and its output
    qkv = b * (q + 2 * k)
    if arch.qk_layernorm:
        qk_norms = b * q + 4 * (w.heads + w.groups)
    else:
        qk_norms = 0
    rotary = 4 * b * w.head_dim
    attention = b * (q + k) + b * q + 4 * w.heads  # the output is the projection's input too
    return norms + qkv + qk_norms + rotary + attention + _mlp(w, True)


def head_bytes(arch: Architecture, layout: Layout, config: Config) -> float:
    """Return the bytes per token that the final norm keeps."""
    w = widths(arch, layout, config)
    return (w.bytes if layout.transformer_engine else 4 + w.bytes) * w.hidden + 4


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches' activations a stage holds at once, as a number of whole
    stages. 1F1B holds one per stage still to come; the interleaved schedule holds chunks of 1 / VPP
    of a stage.
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    if vp == 1:
        return min(pp - stage, micro_batches)
    return min(2 * (pp - stage - 1) + (vp - 1) * pp + 1, micro_batches * vp) / vp


def kept_per_token(
    arch: Architecture, layout: Layout, config: Config, stage: int, flying: float
) -> float:
    """Return the bytes per token that a rank of pipeline ``stage`` keeps of ``flying``
    micro-batches
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    w = widths(arch, layout, config)
    recompute = config.parallel.recompute_granularity
    kept = flying * stage_layers_bytes(
        arch=arch,
        layout=layout,
        config=config,
        stage=stage,
    )
    if pp > 1:
        # A chunk's output stays until its backward pass; its input only as the first layer's,
        # except that the local bf16 norm keeps a copy in fp32. The first chunk receives nothing,
        # the last sends nothing.
        between = w.bytes * w.hidden * flying
        copied = not layout.transformer_engine and w.bytes == 2 and recompute != "full"
        kept += between * (vp - (stage == pp - 1))
        kept += between * (vp - (stage == 0)) * copied
    if stage == pp - 1:
        kept += head_bytes(arch, layout, config)
    return kept


def stage_activations(
    arch: Architecture,
    layout: Layout,
    config: Config,
    stage: int,
    tokens: int,
    responses: int,
    micro_batches: int,
) -> Activations:
    """Return the activations of a rank of pipeline ``stage`` with micro-batches of which it has
    ``tokens``, ``responses`` of them scored.
    """
    w = widths(arch, layout, config)
    recompute = config.parallel.recompute_granularity
    b = w.bytes
    flying = in_flight(layout, stage, micro_batches)
    last = stage == layout.pipeline_model_parallel_size - 1
    # Where a layer's backward pass begins: gradients of its output, of fc2's input and of fc2's
    # weight.
    working = (
        int(tokens * w.routed * (b * w.ffn + 8 * arch.hidden_size)) + b * w.ffn * arch.hidden_size
    )
    if recompute == "full":  # a unit of layers, as the backward pass finds it
        if config.parallel.recompute_method == "uniform":
            unit = config.parallel.recompute_num_layers
        else:
            unit = 1
        working += int(
            tokens
            * unit
            * layer_bytes(
                arch=arch,
                layout=layout,
                config=config,
                recompute="none",
            )
        )
    if recompute == "selective" and "mlp" in config.parallel.recompute_modules:
        working += int(tokens * _mlp(w, layout.transformer_engine))
    cp = config.parallel.context_parallel_size
    if (
        cp > 1
        # keys and values on their way and their gradients, received beside what is sent; or all
        # ranks' at once
    ):
        working += (
            tokens * 2 * w.keys * b * (4 if config.parallel.cp_comm_type == "p2p" else 2 * cp)
        )
    return Activations(
        layers=int(
            tokens
            * kept_per_token(
                arch=arch,
                layout=layout,
                config=config,
                stage=stage,
                flying=flying,
            )
        ),
        logits=output_layer_bytes(
            w=w,
            hidden=arch.hidden_size,
            tokens=tokens,
            responses=responses,
        )
        if last
        else 0,
        working=int(working),
        in_flight=flying,
    )


def output_layer_bytes(w: Widths, hidden: int, tokens: int, responses: int) -> int:
    """Return what the output layer works with at its peak (``policy/output_layer.py``): a chunk's
    logits in fp32 and once more in the model's type (or an eighth of them), the hidden states of
    all rows, those of the response rows and their gradient.
    """
    chunk = min(LOGITS_AT_ONCE, w.vocab * responses)
    return int(
        chunk * (4 + (2 if w.bytes == 2 else 0.5)) + w.bytes * hidden * (tokens + 2 * responses)
    )
