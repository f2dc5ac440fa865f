"""Export direction: the policy's shards, wherever they live in the TP x PP grid, handed on as Hugging Face slices.

Each rank of a replica owns the primary copies of its plan. In turn it packs them into flat buckets of a fixed size and
broadcasts one bucket at a time over the replica; a receiver sees ``Piece`` after ``Piece`` and never a full model.
The plan is computed on every rank alike, so no metadata travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dcpo import runtime
from megatron_dcpo.runtime.distributed import Topology
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.piece import Piece
from megatron_dcpo.weights.planner import Coordinates, Copy, Layout, plan
from megatron_dcpo.weights.table import hf_shapes


class Shards(Protocol):
    """What is exported: one rank's part of a model, as ``policy.model.Policy`` has it."""

    @property
    def arch(self) -> Architecture: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def copies(self) -> tuple[tuple[Copy, ...], ...]: ...
    def parameters(self, chunk: int) -> dict[str, Tensor]: ...


def export_pieces(
    policy: Shards, wanted: Callable[[str], bool] = lambda name: True, bucket_bytes: int = 512 * 2**20
) -> Iterator[Piece]:
    """All pieces of the tensors that ``wanted`` names, on every rank of the replica. Collective over the replica.

    The values are valid until the next piece is asked for. ``bucket_bytes`` bounds the extra memory of a receiver; a
    piece larger than that is cut along its dimension.
    """
    shapes = hf_shapes(policy.arch)
    if policy.topology.tp_size * policy.topology.pp_size == 1:
        for chunk, copies in enumerate(policy.copies):
            parameters = policy.parameters(chunk)
            for copy in copies:
                if copy.primary and wanted(copy.hf):
                    yield Piece(copy.hf, copy.dim, copy.hf_start, _source(parameters, copy))
        return
    itemsize = next(iter(policy.parameters(0).values())).element_size()
    for owner, at in _owners(policy):
        bucket: list[tuple[int, Copy]] = []
        size = 0
        for chunk, copies in enumerate(_plans(policy, at)):
            for copy in copies:
                if not (copy.primary and wanted(copy.hf)):
                    continue
                for part in _cut(copy, shapes[copy.hf], itemsize, bucket_bytes):
                    nbytes = itemsize * _numel(part, shapes[part.hf])
                    if bucket and size + nbytes > bucket_bytes:
                        yield from _broadcast(policy, owner, bucket)
                        bucket, size = [], 0
                    bucket.append((chunk, part))
                    size += nbytes
        if bucket:
            yield from _broadcast(policy, owner, bucket)


def gather_full(policy: Shards, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The full tensors named in ``shapes``, on every rank of the replica, on the CPU. Collective."""
    dtype = next(iter(policy.parameters(0).values())).dtype
    full = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    for piece in export_pieces(policy, full.__contains__):
        piece.write_into(full[piece.name])
    return full


def _owners(policy: Shards) -> Iterator[tuple[int, tuple[int, int]]]:
    """(rank within the replica's group, (tensor, pipeline) coordinates), in a fixed order."""
    for pipeline in range(policy.topology.pp_size):
        for tensor in range(policy.topology.tp_size):
            yield pipeline * policy.topology.tp_size + tensor, (tensor, pipeline)


def _plans(policy: Shards, at: tuple[int, int]) -> list[tuple[Copy, ...]]:
    virtual = range(policy.layout.virtual_pipeline_model_parallel_size)
    return [plan(policy.arch, policy.layout, Coordinates(*at, v)) for v in virtual]


def _source(parameters: dict[str, Tensor], copy: Copy) -> Tensor:
    return parameters[copy.megatron].narrow(copy.dim, copy.start, copy.length)


def _piece_shape(copy: Copy, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(copy.length if d == copy.dim else n for d, n in enumerate(shape))


def _numel(copy: Copy, shape: tuple[int, ...]) -> int:
    return int(torch.Size(_piece_shape(copy, shape)).numel())


def _cut(copy: Copy, shape: tuple[int, ...], itemsize: int, bucket_bytes: int) -> Iterator[Copy]:
    per_index = itemsize * _numel(copy, shape) // copy.length
    step = max(1, bucket_bytes // per_index)
    for first in range(0, copy.length, step):
        stop = min(first + step, copy.length)
        yield Copy(
            copy.hf,
            copy.hf_start + first,
            copy.hf_start + stop,
            copy.megatron,
            copy.start + first,
            copy.dim,
            copy.primary,
        )


def _broadcast(policy: Shards, owner: int, bucket: list[tuple[int, Copy]]) -> Iterator[Piece]:
    """Send one flat bucket from ``owner`` to its replica and cut it into pieces again."""
    shapes = hf_shapes(policy.arch)
    group = policy.topology.model_group
    dtype = next(iter(policy.parameters(0).values())).dtype
    sizes = [_numel(copy, shapes[copy.hf]) for _, copy in bucket]
    if group.rank() == owner:
        parameters = [policy.parameters(chunk) for chunk in range(len(policy.copies))]
        flat = torch.cat([_source(parameters[chunk], copy).reshape(-1) for chunk, copy in bucket])
    else:
        flat = torch.empty(sum(sizes), dtype=dtype, device=runtime.device())
    dist.broadcast(flat, group=group, group_src=owner)
    for (_, copy), values in zip(bucket, flat.split(sizes), strict=True):
        yield Piece(copy.hf, copy.dim, copy.hf_start, values.view(_piece_shape(copy, shapes[copy.hf])))
