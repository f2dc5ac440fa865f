"""The memory of a rank that trains: weights, gradients and optimizer state of its pipeline stage,
and activations.

State is exact, as Megatron lays it out: counted parameter by parameter, with the padding of the
distributed optimizer's buffers. Activations are the bytes per token that the backward pass keeps of
a micro-batch, operator by operator.

There are two layer specs and so two formulas. ``local`` is ``policy/layers.py`` (fp32 norms,
ungrouped products, every operator keeps its own input); its formula has been measured.
``transformer_engine`` keeps less: its fused linear layers hold a norm's input and output once, and
its fused SwiGLU holds only its input. Its formula follows the definitions of the fused operators.

Symbols, per rank: h hidden size, q and k the widths of queries and keys, f the MLP's width, b bytes
per number, t tokens. Under sequence parallelism a rank has t / TP tokens between the linear layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config import Config
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.adapter_shape import adapter_shape
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.pipeline import chunk_layers, layers_per_stage
from megatron_dcpo.weights.planner import interleavings, padded_vocab_size, plan
from megatron_dcpo.weights.table import hf_shapes, is_constant, is_of_experts

# in numbers, in the buffers of the distributed optimizer
PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
# The logits of a chunk on a GPU, and the elements of a product for the gradient of the weight, as
# in policy/output_layer.py, which planning does not import.
LOGITS_AT_ONCE = 1 << 26
PRODUCT_ELEMENTS = 1 << 23
# If tied embeddings are on the first and the last pipeline stage, they have a bucket to themselves.
_SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class State:
    """The bytes of one rank, all its model chunks together.

    numel: its parameters, without padding and adapter.
    buffer_numel: the length of the gradient buffers.
    expert_numel: the part of ``buffer_numel`` for experts that are divided over ranks.
    shard_numel: the parameters of which it holds the optimizer state.
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
    """Return the bytes of a pipeline stage's adapter, which every rank has whole: parameters,
    gradients and moments in fp32.
    """
    adapter = config.model.adapter
    if adapter is None:
        return 0
    shapes = hf_shapes(arch)
    ranks = adapter_shape(adapter, arch).ranks
    numbers = sum(rank * sum(shapes[f"{module}.weight"]) for module, rank in ranks.items())
    layers = layers_per_stage(arch.num_layers, layout)[stage]
    return 16 * numbers * layers // arch.num_layers


def expert_replicas(layout: Layout, data_parallel: int) -> int:
    """Return how many ranks of a stage hold the same experts, if ``data_parallel`` ranks hold the
    same other parameters.
    """
    ranks = layout.tensor_model_parallel_size * data_parallel
    return ranks // (layout.expert_model_parallel_size * layout.expert_tensor)


def stage_state(
    arch: Architecture, layout: Layout, config: Config, stage: int, data_parallel: int
) -> State:
    """Return the state of a rank of pipeline ``stage``, the one with the largest shard if there is
    a distributed optimizer. A frozen policy has only weights and an adapter, and only the adapter's
    gradients are reduced.
    """
    itemsize = dtype_bytes(config.model.params_dtype)
    distributed = config.parallel.use_distributed_optimizer
    # Experts that are divided over ranks have separate buffers.
    dense = _Buffers(data_parallel, distributed)
    experts = _Buffers(expert_replicas(layout, data_parallel), distributed)
    numel = 0
    shared: tuple[str, ...] = ()
    if arch.tied_embeddings and layout.pipeline_model_parallel_size > 1:
        shared = _SHARED
    for virtual in range(layout.virtual_pipeline_model_parallel_size):
        chunk = Coordinates(tensor=0, pipeline=stage, virtual=virtual)
        bucket_size = None
        if config.parallel.overlap_grad_reduce and stage == 0 and virtual == 0:
            bucket_size = max(40_000_000, 1_000_000 * data_parallel)
        sizes_of_dense = []
        sizes_of_experts = []
        for name, size in parameter_sizes(arch, layout, chunk):
            numel += size
            if layout.expert_model_parallel_size > 1 and is_of_experts(name):
                sizes_of_experts.append((size, name in shared))
            else:
                sizes_of_dense.append((size, name in shared))
        dense.add(sizes_of_dense, bucket_size)
        experts.add(sizes_of_experts, bucket_size)
    adapter = adapter_bytes(arch, layout, config, stage)
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
    buffer_numel = dense.length + experts.length
    shard = max(dense.shards) + max(experts.shards)
    main_params = 0
    if itemsize == 2:
        main_params = 4 * shard
    return State(
        numel=numel,
        buffer_numel=buffer_numel,
        expert_numel=experts.length,
        shard_numel=shard,
        weights=itemsize * (buffer_numel if distributed else numel),
        gradients=4 * buffer_numel,
        main_params=main_params,
        moments=8 * shard,
        adapter=adapter,
    )


class _Buffers:
    """The gradient buffers over ``ranks`` data-parallel ranks: their length, and the numbers whose
    optimizer state each rank holds.
    """

    def __init__(self, ranks: int, distributed: bool) -> None:
        self.length = 0
        self.shards = [0] * ranks
        self._distributed = distributed

    def add(self, sizes: Sequence[tuple[int, bool]], bucket_size: int | None) -> None:
        """Add the parameters of a model chunk: for each its numbers, and whether it is the shared
        embedding.
        """
        if not self._distributed:
            numbers = sum(size for size, _ in sizes)
            self.length += numbers
            self.shards[0] += numbers
            return
        ranks = len(self.shards)
        for bucket in _buckets(sizes, ranks, bucket_size):
            self.length += bucket.length
            for rank, numel in enumerate(_numel_per_rank(bucket, ranks)):
                self.shards[rank] += numel


def parameter_sizes(
    arch: Architecture, layout: Layout, chunk: Coordinates
) -> list[tuple[str, int]]:
    """Return name and numbers of every parameter of a model chunk on one rank, in the model's
    order.
    """
    shapes = hf_shapes(arch)
    kinds = interleavings(arch, layout, chunk)
    sizes = dict.fromkeys(kinds, 0)
    for copy in plan(arch, layout, chunk):
        if is_constant(copy.hf):
            del sizes[copy.megatron]
            continue
        shape = shapes[copy.hf]
        if kinds[copy.megatron] == "vocab":
            rows = padded_vocab_size(arch, layout) // layout.tensor_model_parallel_size
            sizes[copy.megatron] = rows * shape[1]
        else:
            sizes[copy.megatron] += copy.length * math.prod(shape) // shape[copy.dim]
    return list(sizes.items())


@dataclass(frozen=True)
class _Bucket:
    """A stretch of the gradient buffer. ``params`` are start and stop of its parameters."""

    length: int
    params: tuple[tuple[int, int], ...]


def _buckets(
    sizes: Sequence[tuple[int, bool]], data_parallel: int, bucket_size: int | None
) -> Iterator[_Bucket]:
    """Yield buckets as Megatron's ``_ParamAndGradBuffer`` makes them: parameters from last to
    first, each aligned, and buckets aligned at their end.

    ``sizes`` has the numbers of each parameter, and whether it is the shared embedding.
    """
    alignment = math.lcm(data_parallel, BUCKET_ALIGNMENT)
    params: list[tuple[int, int]] = []
    position = 0

    def bucket() -> _Bucket:
        return _Bucket(length=-(-position // alignment) * alignment, params=tuple(params))

    for size, shared in reversed(sizes):
        position = -(-position // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        if shared and params:
            yield bucket()
            params = []
            position = 0
        params.append((position, position + size))
        position += size
        if shared or (bucket_size is not None and position >= bucket_size):
            yield bucket()
            params = []
            position = 0
    if params:
        yield bucket()


def _numel_per_rank(bucket: _Bucket, ranks: int) -> list[int]:
    """Return how many numbers of the bucket's parameters are in each data-parallel rank's equal
    part of it.
    """
    part = bucket.length // ranks
    numels = [0] * ranks
    for start, stop in bucket.params:
        for rank in range(start // part, (stop - 1) // part + 1):
            numels[rank] += min(stop, (rank + 1) * part) - max(start, rank * part)
    return numels


@dataclass(frozen=True)
class Widths:
    """The sizes of one layer on one rank.

    vocab: the tokens of which it has the logits, without padding.
    hidden: an average; under sequence parallelism a rank has one in TP tokens.
    routed: the inputs of MLPs per token; with experts also an average, which uneven routing
        exceeds.
    shared: the width of the shared expert, which all tokens go through.
    rotary: the rotated dimensions of a head.
    """

    hidden: float
    routed: float
    queries: int
    keys: int
    heads: int
    groups: int
    ffn: int
    shared: int
    vocab: int
    rotary: int
    bytes: int


@dataclass(frozen=True)
class Activations:
    """The bytes of one rank at the peak of training.

    layers: kept for the backward pass by all micro-batches in flight.
    logits: of the output layer, on the last stage, with what else is alive in a forward pass.
    working: the largest transient of one layer's backward pass, with what else is alive there.
    """

    layers: int
    logits: int
    working: int
    in_flight: float

    @property
    def total(self) -> int:
        return self.layers + max(self.logits, self.working)


def layer_of_each_kind(arch: Architecture) -> tuple[int, ...]:
    """Return a layer of each kind, with experts and without."""
    by_kind = {arch.has_experts(layer): layer for layer in range(arch.num_layers)}
    return tuple(by_kind.values())


def widths(arch: Architecture, layout: Layout, config: Config, layer: int = -1) -> Widths:
    """Return the sizes of ``layer``, by default the last one."""
    tp = layout.tensor_model_parallel_size
    etp = layout.expert_tensor
    routed = 1.0
    ffn = (arch.dense_ffn_hidden_size or arch.ffn_hidden_size) // tp
    shared = 0
    if arch.has_experts(layer % arch.num_layers):
        routed = arch.experts_per_token * etp / tp
        ffn = arch.ffn_hidden_size // etp
        shared = arch.shared_ffn_hidden_size // tp
    return Widths(
        hidden=arch.hidden_size / (tp if config.parallel.sequence_parallel else 1),
        routed=routed,
        queries=arch.num_attention_heads * arch.kv_channels // tp,
        keys=arch.num_query_groups * arch.kv_channels // tp,
        heads=arch.num_attention_heads // tp,
        groups=arch.num_query_groups // tp,
        ffn=ffn,
        shared=shared,
        vocab=min(arch.vocab_size, padded_vocab_size(arch, layout) // tp),
        rotary=arch.rotary_dimensions,
        bytes=dtype_bytes(config.model.params_dtype),
    )


def layer_bytes(
    arch: Architecture, layout: Layout, config: Config, layer: int, recompute: str
) -> float:
    """Return the bytes per token that ``layer`` keeps under ``recompute``: everything for ``none``,
    not the activations of ``parallel.megatron.recompute_modules`` for ``selective``, only its input
    for ``full``.
    """
    w = widths(arch, layout, config, layer)
    b = w.bytes
    if recompute == "full":
        return b * w.hidden
    if layout.transformer_engine:
        kept = _transformer_engine(arch, w)
    else:
        kept = _local(arch, w)
    adapter = config.model.adapter
    if adapter is not None:
        # A x of every projection, on average over the layers
        kept += b * sum(adapter_shape(adapter, arch).ranks.values()) // arch.num_layers
        if layout.transformer_engine:
            # The fused norm returns no output, so the adapter computes it again, in fp32.
            kept += 2 * 4 * w.hidden
    cp = config.parallel.context_parallel_size
    if cp > 1 and not layout.transformer_engine:
        # the keys and values of all ranks instead of the rank's keys
        kept += b * w.keys * (2 * cp - 1)
    if recompute == "selective":
        kept -= _recomputed_bytes(layout, config, w)
    if arch.has_experts(layer):
        kept += _routing(arch, w, layout.transformer_engine)
    return kept


def _recomputed_bytes(layout: Layout, config: Config, w: Widths) -> float:
    """Return the bytes per token that selective recomputation does not keep."""
    modules = config.parallel.recompute_modules
    saved = 0.0
    if "core_attn" in modules:
        # The checkpoint keeps q, k and v, which the attention would have kept anyway.
        saved += 4 * w.heads
        if not layout.transformer_engine:
            saved += w.bytes * w.queries
    if "mlp" in modules:
        # The checkpoint keeps the MLP's input. In the local layer that is counted with its norm;
        # in Transformer Engine's layer the norm is part of the MLP.
        saved += _mlp(w, layout.transformer_engine)
        if layout.transformer_engine:
            saved += w.bytes * w.hidden + 4
    return saved


def stage_layers_bytes(arch: Architecture, layout: Layout, config: Config, stage: int) -> float:
    """Return :func:`layer_bytes` summed over a pipeline stage, with the recomputation that
    ``parallel.megatron.recompute_method`` asks for.
    """
    parallel = config.parallel
    vp = layout.virtual_pipeline_model_parallel_size
    chunks = chunk_layers(arch.num_layers, layout)[stage :: layout.pipeline_model_parallel_size]
    kept = functools.partial(layer_bytes, arch, layout, config)
    chunk_bytes = []
    for layers in chunks:
        recompute: str = parallel.recompute_granularity
        if recompute == "full" and parallel.recompute_method == "uniform":
            # the input of every unit
            layers = layers[:: parallel.recompute_num_layers]
        recomputed = len(layers)
        if recompute == "full" and parallel.recompute_method == "block":
            recomputed = parallel.recompute_num_layers
        chunk_bytes.append(
            sum(kept(layer, recompute=recompute) for layer in layers[:recomputed])
            + sum(kept(layer, recompute="none") for layer in layers[recomputed:])
        )
    # The schedule may hold the most of the stage's largest model chunk.
    return vp * max(chunk_bytes)


def recomputed_share(arch: Architecture, layout: Layout, config: Config) -> float:
    """Return the part of a forward pass that the backward pass repeats, roughly."""
    parallel = config.parallel
    if parallel.recompute_granularity == "none":
        return 0.0
    if parallel.recompute_granularity == "selective":
        attention = 0.1 * ("core_attn" in parallel.recompute_modules)
        mlp = 0.6 * ("mlp" in parallel.recompute_modules)
        return attention + mlp
    if parallel.recompute_method == "uniform":
        return 1.0
    recomputed = 0
    for layers in chunk_layers(arch.num_layers, layout):
        recomputed += min(len(layers), parallel.recompute_num_layers)
    return recomputed / arch.num_layers


def _mlp(w: Widths, transformer_engine: bool) -> float:
    """Return the bytes per token of an MLP's inner tensors: the outputs of fc1 and SwiGLU (three
    widths), or, in the local layer, of fc1, SiLU, the linear half and their product (five).
    """
    numbers = w.ffn * w.routed + w.shared
    if transformer_engine:
        return w.bytes * numbers * 3
    return w.bytes * numbers * 5


def _routing(arch: Architecture, w: Widths, transformer_engine: bool) -> float:
    """Return the bytes per token that experts keep in addition: the router's scores and choices,
    and for each choice the permuted token, two indices and two weights. The local layer also keeps
    SwiGLU's output before it is weighted.
    """
    width = arch.hidden_size
    if not transformer_engine:
        width += w.ffn
    choice = w.bytes * width + 24
    return w.routed * choice + 5 * arch.num_experts * w.hidden / arch.hidden_size


def _local(arch: Architecture, w: Widths) -> float:
    b = w.bytes
    q = w.queries
    k = w.keys
    normalized = 4 if arch.zero_centered_norms else b
    # the input in fp32, what is normalized, and what is scaled
    norms = _norms(arch, w, input_bytes=4 + normalized + b, output_bytes=4 + normalized)
    qkv = b * (q + 2 * k)  # the output of the projection, of which the values are views
    qk_norms = 0
    if arch.qk_layernorm or arch.whole_qk_layernorm:
        fp32_inputs = 0
        if b == 2 or arch.whole_qk_layernorm:
            fp32_inputs = 4 * (q + k)
        elif w.heads != w.groups:
            fp32_inputs = 4 * q  # a group's queries are copied out of the projection's output
        qk_norms = fp32_inputs + normalized * (q + k) + 4 * (w.heads + w.groups)
    rotary = 4 * b * w.rotary  # cosine and sine, for queries and for keys
    attention = b * (q + k) + b * q + 4 * w.heads  # rotated queries and keys, output, log-sum-exp
    projection = b * q
    return norms + qkv + qk_norms + rotary + attention + projection + _mlp(w, False)


def _norms(arch: Architecture, w: Widths, input_bytes: float, output_bytes: float) -> float:
    """Return the bytes per token of a layer's norms, given those per number that a norm of the
    input of attention or MLP keeps, with its result, which the linear layer keeps, and one of their
    output; besides 1/rms. Without a norm of its input, a linear layer keeps the hidden state.
    """
    total = 0.0
    for norm in (arch.norms.attention_input, arch.norms.mlp_input):
        if norm is None:
            total += w.bytes * w.hidden
        else:
            total += input_bytes * w.hidden + 4
    for norm in (arch.norms.attention_output, arch.norms.mlp_output):
        if norm is not None:
            total += output_bytes * w.hidden + 4
    return total


def _transformer_engine(arch: Architecture, w: Widths) -> float:
    b = w.bytes
    q = w.queries
    k = w.keys
    # the input, and what is scaled
    norms = _norms(arch, w, input_bytes=2 * b, output_bytes=b)
    qkv = b * (q + 2 * k)
    qk_norms = 0
    if arch.qk_layernorm:
        qk_norms = b * q + 4 * (w.heads + w.groups)
    if arch.whole_qk_layernorm:
        # the norm of policy/norms.py: its input in fp32, and what is normalized
        qk_norms = (4 + b) * (q + k)
    rotary = 4 * b * w.rotary
    attention = b * (q + k) + b * q + 4 * w.heads  # the output is the projection's input too
    return norms + qkv + qk_norms + rotary + attention + _mlp(w, True)


def head_bytes(arch: Architecture, layout: Layout, config: Config) -> float:
    """Return the bytes per token that the final norm keeps."""
    w = widths(arch, layout, config)
    kept = w.bytes
    if not layout.transformer_engine:
        kept += 4
    return kept * w.hidden + 4


def in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches' activations a stage holds at once, in units of a whole stage.
    1F1B holds one for each stage still to come; the interleaved schedule holds chunks of 1 / VPP of
    a stage.
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    if vp == 1:
        return min(pp - stage, micro_batches)
    return min(2 * (pp - stage - 1) + (vp - 1) * pp + 1, micro_batches * vp) / vp


def kept_per_token(
    arch: Architecture, layout: Layout, config: Config, stage: int, flying: float
) -> float:
    """Return the bytes per token that a rank of pipeline ``stage`` keeps with ``flying``
    micro-batches in flight.
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    w = widths(arch, layout, config)
    kept = flying * stage_layers_bytes(arch, layout, config, stage)
    if pp > 1:
        # A chunk's output stays until its backward pass. Its input stays only as the input of the
        # first layer, except that the local bf16 norm keeps a copy in fp32. The first chunk
        # receives nothing, and the last one sends nothing.
        between = w.bytes * w.hidden * flying
        kept += between * (vp - (stage == pp - 1))
        recompute = config.parallel.recompute_granularity
        if not layout.transformer_engine and w.bytes == 2 and recompute != "full":
            kept += between * (vp - (stage == 0))
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
    """Return the activations of a rank of pipeline ``stage`` that has ``tokens`` of each of the
    ``micro_batches``, with ``responses`` of them scored.
    """
    w = widths(arch, layout, config)
    flying = in_flight(layout, stage, micro_batches)
    kept = kept_per_token(arch, layout, config, stage, flying)
    is_last = stage == layout.pipeline_model_parallel_size - 1
    has_passed_one_back = stage > 0 and micro_batches > 1
    between = int(tokens * w.bytes * w.hidden)
    gathered = 0
    if config.parallel.sequence_parallel:
        gathered = tokens * w.bytes * arch.hidden_size
    logits = 0
    if is_last:
        logits = output_layer_bytes(
            w=w,
            hidden=arch.hidden_size,
            tokens=tokens,
            responses=responses,
            learns=not config.frozen,
        )
        # Until the next loss is there, Megatron's schedule has the last one, whose graph has its
        # input, and the gradient that it sent.
        logits += 2 * between * has_passed_one_back
        if not layout.transformer_engine:
            # Megatron's buffer for the whole sequences, which it never gives back
            logits += gathered
    working = max(
        _working_bytes(arch, layout, config, widths(arch, layout, config, layer), tokens)
        for layer in layer_of_each_kind(arch)
    )
    # the gradient that it sent last, and the one that it received for this micro-batch
    working += between * (has_passed_one_back + (not is_last))
    working += gathered
    return Activations(layers=int(tokens * kept), logits=logits, working=working, in_flight=flying)


def _working_bytes(
    arch: Architecture, layout: Layout, config: Config, w: Widths, tokens: int
) -> int:
    """Return the bytes of the largest transient of the backward pass of one layer, which has the
    sizes ``w``.
    """
    parallel = config.parallel
    b = w.bytes
    # At the beginning: gradients of the layer's output, of fc2's input and of fc2's weight.
    working = int(tokens * w.routed * (b * w.ffn + 8 * arch.hidden_size))
    working += b * w.ffn * arch.hidden_size
    if parallel.recompute_granularity == "full":
        # one unit of layers, as the backward pass computes it again
        unit = 1
        if parallel.recompute_method == "uniform":
            unit = parallel.recompute_num_layers
        largest = max(
            layer_bytes(arch, layout, config, layer, recompute="none")
            for layer in layer_of_each_kind(arch)
        )
        working += int(tokens * unit * largest)
        if layout.transformer_engine or b == 4:
            # The first norm's input is the one that is kept; a bf16 norm of the local layer has a
            # copy in fp32.
            working -= int(tokens * b * w.hidden)
    if parallel.recompute_granularity == "selective" and "mlp" in parallel.recompute_modules:
        working += int(tokens * _mlp(w, layout.transformer_engine))
    cp = parallel.context_parallel_size
    if cp > 1:
        # Keys and values and their gradients, in transit and received; or of all ranks at once.
        copies = 2 * cp
        if parallel.cp_comm_type == "p2p":
            copies = 4
        working += tokens * 2 * w.keys * b * copies
    return int(working)


def output_layer_bytes(
    w: Widths, hidden: int, tokens: int, responses: int, learns: bool = True
) -> int:
    """Return the bytes with which the output layer works at its peak (``policy/output_layer.py``):
    a chunk's logits in fp32 and again in the model's type (or an eighth of them), the hidden states
    of all rows, those of the response rows and their gradient, and, if the layer ``learns`` and has
    another type than its gradient's sums, one product for them, which a GPU does without.
    """
    chunk = min(LOGITS_AT_ONCE, w.vocab * responses)
    bytes_per_logit = 4 + (2 if w.bytes == 2 else 0.5)
    product = 0
    if learns and w.bytes == 2:
        product = w.bytes * min(PRODUCT_ELEMENTS, w.vocab * hidden)
    rows = w.bytes * hidden * (tokens + 2 * responses)
    return int(chunk * bytes_per_logit + rows + product)
