"""Weights, gradients and optimizer state of a pipeline stage, as Megatron lays them out. Exact: counted parameter by
parameter, with the padding of the distributed optimizer's buffers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_dcpo.config import Config
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.planner import Coordinates, Layout, interleavings, padded_vocab_size, plan
from megatron_dcpo.weights.table import hf_shapes

ITEMSIZE = {"bf16": 2, "fp32": 4}
PARAMETER_ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # numbers; the distributed optimizer's buffers
# Tied, on the first and the last pipeline stage: a bucket of its own.
_SHARED = ("embedding.word_embeddings.weight", "output_layer.weight")


@dataclass(frozen=True)
class State:
    """Bytes of one rank, all its model chunks together. ``numel``: its parameters, padding not counted;
    ``buffer_numel``: the gradient buffers' length; ``shard_numel``: parameters of which it holds the optimizer state."""

    numel: int
    buffer_numel: int
    shard_numel: int
    weights: int
    gradients: int
    main_params: int
    moments: int


def stage_state(arch: Architecture, layout: Layout, config: Config, stage: int, data_parallel: int) -> State:
    """The state of a rank of pipeline ``stage``; with the distributed optimizer, of the one with the largest shard."""
    itemsize, parallel = ITEMSIZE[config.model.params_dtype], config.parallel
    numel = buffer_numel = 0
    shards = [0] * (data_parallel if parallel.use_distributed_optimizer else 1)
    for virtual in range(layout.virtual_pipeline_model_parallel_size):
        sizes = parameter_sizes(arch, layout, Coordinates(0, stage, virtual))
        numel += sum(size for _, size in sizes)
        if not parallel.use_distributed_optimizer:
            buffer_numel += sum(size for _, size in sizes)
            shards[0] += sum(size for _, size in sizes)
            continue
        bucketing = parallel.overlap_grad_reduce and stage == 0 and virtual == 0
        bucket_size = max(40_000_000, 1_000_000 * data_parallel) if bucketing else None
        shared = _SHARED if arch.tied_embeddings and layout.pipeline_model_parallel_size > 1 else ()
        for bucket in _buckets([(size, name in shared) for name, size in sizes], data_parallel, bucket_size):
            buffer_numel += bucket.length
            for rank, held in enumerate(_held(bucket, data_parallel)):
                shards[rank] += held
    shard = max(shards)
    padded = buffer_numel if parallel.use_distributed_optimizer else numel
    return State(
        numel=numel,
        buffer_numel=buffer_numel,
        shard_numel=shard,
        weights=itemsize * padded,
        gradients=4 * buffer_numel,
        main_params=4 * shard if itemsize == 2 else 0,
        moments=8 * shard,
    )


def parameter_sizes(arch: Architecture, layout: Layout, at: Coordinates) -> list[tuple[str, int]]:
    """(name, numbers) of every parameter of a model chunk on one rank, in the model's order."""
    shapes, kinds = hf_shapes(arch), interleavings(arch, layout, at)
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


def _buckets(sizes: Sequence[tuple[int, bool]], data_parallel: int, bucket_size: int | None) -> Iterator[_Bucket]:
    """Megatron's ``_ParamAndGradBuffer``: parameters from last to first, each aligned, buckets aligned at their end.

    ``sizes``: (numbers, whether the parameter is the shared embedding).
    """
    alignment = math.lcm(data_parallel, BUCKET_ALIGNMENT)
    params: list[tuple[int, int]] = []
    position = 0
    for size, shared in reversed(sizes):
        position = -(-position // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
        if shared and params:
            yield _Bucket(-(-position // alignment) * alignment, tuple(params))
            params, position = [], 0
        params.append((position, position + size))
        position += size
        if shared or (bucket_size is not None and position >= bucket_size):
            yield _Bucket(-(-position // alignment) * alignment, tuple(params))
            params, position = [], 0
    if params:
        yield _Bucket(-(-position // alignment) * alignment, tuple(params))


def _held(bucket: _Bucket, ranks: int) -> list[int]:
    """Numbers of the bucket's parameters in each data-parallel rank's equal part of it."""
    part = bucket.length // ranks
    held = [0] * ranks
    for start, stop in bucket.params:
        for rank in range(start // part, (stop - 1) // part + 1):
            held[rank] += min(stop, (rank + 1) * part) - max(start, rank * part)
    return held
