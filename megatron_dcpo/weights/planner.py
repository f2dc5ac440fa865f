"""The copy planner: table + parallel layout -> the slice copies of one rank. Pure: no tensors, no
collectives.

Every Megatron parameter is cut along one dimension, and so is every Hugging Face tensor in it; a
plan is therefore a list of interval pairs along that dimension. Import runs the pairs from Hugging
Face to Megatron, export and resharding run the same pairs the other way. :class:`WeightSlice` is
the form in which weights leave the policy.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config.rules import check_layout_sizes
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.pipeline import chunk_layers
from megatron_dcpo.weights.table import (
    EMBEDDING_ROW,
    FINAL_NORM_ROW,
    Interleaving,
    Row,
    experts_of,
    hf_shapes,
    layer_rows,
    output_row,
    transformer_engine_row,
)


@dataclass(frozen=True)
class Copy:
    """The Hugging Face slice ``hf[hf_start:hf_stop]`` along ``dim`` is the slice of the Megatron
    tensor ``megatron`` that begins at ``start``.

    ``primary`` marks one owner among the ranks that hold the same values (replicated tensors, tied
    embeddings): export sends primary copies only, import fills all.
    """

    hf: str
    hf_start: int
    hf_stop: int
    megatron: str
    start: int
    dim: int
    primary: bool

    @property
    def length(self) -> int:
        return self.hf_stop - self.hf_start


def padded_vocab_size(arch: Architecture, layout: Layout) -> int:
    """Return the rows of the embedding with padding, a multiple of ``make_vocab_size_divisible_by``
    x TP.
    """
    multiple = layout.make_vocab_size_divisible_by * layout.tensor_model_parallel_size
    return -(-arch.vocab_size // multiple) * multiple


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Raise :class:`UserError` for a layout that does not divide the model."""
    check_layout_sizes(arch, layout)
    chunk_layers(arch.num_layers, layout)


@functools.lru_cache(maxsize=1024)
def plan(arch: Architecture, layout: Layout, at: Coordinates) -> tuple[Copy, ...]:
    """Return all copies of the model chunk at ``at``, in parameter order. Deterministic; cached."""
    check_layout(arch, layout)
    copies: list[Copy] = []
    for row, primary, is_expert in _chunk_rows(arch, layout, at):
        tp = layout.tensor_model_parallel_size
        rank = at.tensor
        if is_expert:
            tp = layout.expert_tensor
            rank = at.expert_tensor
        copies.extend(_copies(arch=arch, layout=layout, tp=tp, rank=rank, row=row, primary=primary))
    return tuple(copies)


def sharded_dimensions(
    arch: Architecture, layout: Layout, at: Coordinates
) -> dict[str, int | None]:
    """Return the dimension of every parameter of the chunk that is split over tensor-parallel
    ranks, ``None`` for replicated parameters.
    """
    dimensions: dict[str, int | None] = {}
    for row, *_ in _chunk_rows(arch, layout, at):
        if row.interleaving == "replicated":
            dimensions[row.megatron] = None
        elif row.interleaving == "row":
            dimensions[row.megatron] = 1
        else:
            dimensions[row.megatron] = 0
    return dimensions


def interleavings(arch: Architecture, layout: Layout, at: Coordinates) -> dict[str, Interleaving]:
    """Return how the Hugging Face tensors of every parameter of the chunk interleave."""
    return {row.megatron: row.interleaving for row, *_ in _chunk_rows(arch, layout, at)}


def checksum(copies: tuple[Copy, ...]) -> str:
    """Return a short fingerprint of a plan. It is equal on all ranks that should agree, and across
    releases that move the same bytes.
    """
    return hashlib.sha256(repr(copies).encode()).hexdigest()[:16]


def _chunk_rows(
    arch: Architecture, layout: Layout, at: Coordinates
) -> Iterator[tuple[Row, bool, bool]]:
    """Yield the rows of one model chunk with the global numbers filled in on the Hugging Face side,
    whether a row is primary, and whether it is an expert's.
    """
    pp = layout.pipeline_model_parallel_size
    vp = layout.virtual_pipeline_model_parallel_size
    first = at.pipeline == at.virtual == 0
    last = at.pipeline == pp - 1 and at.virtual == vp - 1
    layers = chunk_layers(arch.num_layers, layout)[at.virtual * pp + at.pipeline]
    if first:
        yield EMBEDDING_ROW, True, False
    for local, layer in enumerate(layers):
        for row in layer_rows(arch, layer):
            named = row
            if layout.transformer_engine:
                named = transformer_engine_row(arch, layer, row)
            experts = experts_of(arch, row)
            if row.is_expert:
                number = len(experts) // layout.expert_model_parallel_size
                experts = experts[at.expert * number : (at.expert + 1) * number]
            for index, expert in enumerate(experts):
                numbered = named.at(layer=local, expert=index, hf_layer=layer, hf_expert=expert)
                yield numbered, True, row.is_expert
    if last:
        yield FINAL_NORM_ROW, True, False
        # Megatron shares the tensor if it is tied and on the stage of the embedding.
        if not (arch.tied_embeddings and first):
            yield output_row(arch), not arch.tied_embeddings, False


def _copies(
    arch: Architecture, layout: Layout, tp: int, rank: int, row: Row, primary: bool
) -> Iterator[Copy]:
    """Yield the copies of a row of the table on ``rank`` of the ``tp`` ranks that divide its
    tensors.
    """
    shapes = hf_shapes(arch)
    shape = shapes[row.hf[0]]
    copy = partial(Copy, megatron=row.megatron, primary=primary)
    if row.interleaving == "replicated":
        yield Copy(
            hf=row.hf[0],
            hf_start=0,
            hf_stop=shape[0],
            megatron=row.megatron,
            start=0,
            dim=0,
            primary=primary and rank == 0,
        )
    elif row.interleaving in ("column", "norm_of_heads", "row"):
        dim = 1 if row.interleaving == "row" else 0
        size = shape[dim] // tp
        yield copy(hf=row.hf[0], hf_start=rank * size, hf_stop=(rank + 1) * size, start=0, dim=dim)
    elif row.interleaving == "vocab":
        size = padded_vocab_size(arch, layout) // tp
        start = rank * size
        stop = min((rank + 1) * size, arch.vocab_size)
        if start < stop:
            yield copy(hf=row.hf[0], hf_start=start, hf_stop=stop, start=0, dim=0)
    elif row.interleaving == "gate_up":
        start = 0
        for name in row.hf:
            size = shapes[name][0] // tp
            yield copy(hf=name, hf_start=rank * size, hf_stop=(rank + 1) * size, start=start, dim=0)
            start += size
    else:
        yield from _qkv_copies(arch=arch, tp=tp, rank=rank, row=row, primary=primary)


def _qkv_copies(arch: Architecture, tp: int, rank: int, row: Row, primary: bool) -> Iterator[Copy]:
    """Yield the copies of Q, K and V, query group by query group."""
    groups = arch.num_query_groups // tp
    start = 0
    for group in range(rank * groups, (rank + 1) * groups):
        for name, first, rows in _query_group(arch, row, group):
            yield Copy(
                hf=name,
                hf_start=first,
                hf_stop=first + rows,
                megatron=row.megatron,
                start=start,
                dim=0,
                primary=primary,
            )
            start += rows


def _query_group(arch: Architecture, row: Row, group: int) -> list[tuple[str, int, int]]:
    """Return what a query group holds, in its order, as tensor, first row and number of rows: its
    query heads, one key head and one value head.
    """
    d = arch.kv_channels
    heads = arch.num_attention_heads // arch.num_query_groups
    queries, keys, values = row.hf
    return [
        (queries, group * heads * d, heads * d),
        (keys, group * d, d),
        (values, group * d, d),
    ]


@dataclass(frozen=True)
class WeightSlice:
    """``values`` are rows (dim 0) or columns (dim 1) ``start : start + values.shape[dim]`` of
    tensor ``name``.
    """

    name: str
    dim: int
    start: int
    values: Tensor

    def write_into(self, tensor: Tensor) -> None:
        """Copy the slice to its place in the full ``tensor``."""
        tensor.detach().narrow(self.dim, self.start, self.values.shape[self.dim]).copy_(
            self.values.detach()
        )
