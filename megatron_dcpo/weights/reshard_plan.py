"""The plan of a weight synchronization: which bytes go from which trainer rank to which, bucket by
bucket. Pure.

Every engine rank gets, of every Hugging Face tensor, the slice it keeps by vLLM's rule for dense
models (the whole tensor with an engine of one rank). What it holds already as a trainer rank is not
sent; the rest is sent once, by its owner, so the bytes a rank receives are the least possible. Two
passes: per tensor the list of :class:`TransferOp`, then the operations packed into buckets; a
tensor that is larger than a bucket is cut into several entries.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_dcpo.config.rules import VOCABULARY_MULTIPLE
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import Copy, plan
from megatron_dcpo.weights.table import engine_cuts, hf_shapes

BUCKET_BYTES = 512 * 2**20
Slice = tuple[int, int, int]  # dimension, start, stop
# of a bucket, one part in so many is for the message on its way, the rest for what has arrived
MESSAGE_SHARE = 8


@dataclass(frozen=True)
class TransferOp:
    """``hf[start:stop]`` along ``dim``, the ranks of the replica that hold it (the owner first) and
    those that need it.

    ``interleaved``: Megatron keeps it in several places (query groups), so a holder has to put it
    together as well.
    """

    hf: str
    dim: int
    start: int
    stop: int
    numel: int
    holders: tuple[int, ...]
    readers: tuple[int, ...]
    interleaved: bool

    def cut(self, start: int, stop: int, readers: tuple[int, ...]) -> TransferOp:
        """Return ``hf[start:stop]`` of this, for ``readers``."""
        numel = self.numel // (self.stop - self.start) * (stop - start)
        return replace(self, start=start, stop=stop, numel=numel, readers=readers)

    def overlap(self, slice_: Slice) -> int:
        """Return the indices of this in a slice of the tensor."""
        return max(0, min(self.stop, slice_[2]) - max(self.start, slice_[1]))


@dataclass(frozen=True)
class Message:
    """Operations whose values are sent flat, one after the other, from ``owner`` to ``readers``
    (ranks of the replica).
    """

    owner: int
    readers: tuple[int, ...]
    ops: tuple[TransferOp, ...]

    @property
    def numel(self) -> int:
        return sum(op.numel for op in self.ops)


@dataclass(frozen=True)
class BucketEntry:
    """Tensor ``hf``, or as much of it as a bucket holds. ``slices``: what each rank keeps of it."""

    hf: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Bucket:
    """Entries handed to the engine in one call, of every tensor at most one; and the messages that
    bring what a rank lacks of them.
    """

    entries: tuple[BucketEntry, ...]
    messages: tuple[Message, ...]


_Held = dict[str, list[TransferOp]]  # of every tensor, what ranks hold
_Slices = dict[str, tuple[Slice, ...]]  # of every tensor, what each rank's engine keeps
_Planned = tuple[BucketEntry, list[TransferOp]]


@dataclass(frozen=True)
class ReshardPlan:
    """What one synchronization moves within a replica. Bytes; tuples are indexed by the rank within
    the replica.

    ``received``: by the messages; ``least``: what a rank needs less what it holds, computed apart
    from them; ``least_whole``: the same if every rank were given whole tensors. ``assembled``: the
    largest buffer in which a rank puts slices together; ``message``: the largest message.
    """

    bucket_bytes: int
    itemsize: int
    replicas: int
    engine_tensor_model_parallel_size: int
    buckets: tuple[Bucket, ...]
    received: tuple[int, ...]
    least: tuple[int, ...]
    least_whole: tuple[int, ...]
    assembled: int
    message: int

    @property
    def peak_bytes(self) -> int:
        """Return the extra memory of a rank during the synchronization; at most ``bucket_bytes``."""
        return self.assembled + self.message

    @functools.cached_property
    def checksum(self) -> str:
        """Return a number that is equal on ranks that will move the same bytes."""
        return hashlib.sha256(repr((self.itemsize, self.buckets)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def reshard_plan(
    arch: Architecture,
    layout: Layout,
    engine_tensor_model_parallel_size: int = 1,
    replicas: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    itemsize: int = 2,
    only: tuple[str, ...] | None = None,
    replica: int = 0,
    merged: tuple[str, ...] = (),
) -> ReshardPlan:
    """Plan the synchronization of ``arch`` from ``layout`` into engines on the same ranks.
    Deterministic; cached.

    Args:
        replicas, replica: data-parallel replicas of the trainer and the one in question; each
        synchronizes within
            itself. Engines are blocks of consecutive ranks, whatever replica these belong to.
        bucket_bytes: bound of the extra memory of a rank, the message on its way included.
        itemsize: bytes per number of the trainer's parameters.
        only: these tensors (export of one file); all by default.
        merged: tensors to which something is added on the way, so that no parameter is handed on as
        it is.

    The engine's tensor-parallel size must divide the model (``config.rules.check_engine_size``).
    Raises :class:`UserError` when a bucket cannot even hold a row of one of its tensors.
    """
    names = [name for name in hf_shapes(arch) if only is None or name in only]
    ranks = layout.width * layout.pipeline_model_parallel_size
    at = _engine_ranks(layout, engine_tensor_model_parallel_size, replicas, replica)
    slices = {
        n: tuple(engine_slice(arch, n, engine_tensor_model_parallel_size, rank) for rank in at)
        for n in names
    }
    whole = {name: tuple(engine_slice(arch, name, 1, 0) for _ in at) for name in names}
    held_ops = _held(arch, layout, names)
    message, capacity = _share_of_a_bucket(arch, names, ranks, bucket_bytes, itemsize)
    buckets, assembled = [], 0
    for packed in _pack(_entries(arch, held_ops, slices, capacity, merged), capacity, merged):
        messages = _messages([op for _, ops in packed for op in ops], message)
        buckets.append(Bucket(tuple(entry for entry, _ in packed), tuple(messages)))
        assembled = max(assembled, *_sum(_to_assemble(*planned, merged) for planned in packed))
    sent = [message for bucket in buckets for message in bucket.messages]
    return ReshardPlan(
        bucket_bytes=bucket_bytes,
        itemsize=itemsize,
        replicas=replicas,
        engine_tensor_model_parallel_size=engine_tensor_model_parallel_size,
        buckets=tuple(buckets),
        received=tuple(
            itemsize * sum(m.numel for m in sent if rank in m.readers) for rank in range(ranks)
        ),
        least=_least(arch, held_ops, slices, itemsize),
        least_whole=_least(arch, held_ops, whole, itemsize),
        assembled=itemsize * assembled,
        message=itemsize * max((m.numel for m in sent), default=0),
    )


def most_received(
    arch: Architecture,
    layout: Layout,
    engine_tensor_model_parallel_size: int,
    replicas: int,
    itemsize: int,
) -> int:
    """Return the bytes that the rank receiving most gets in a synchronization, over all replicas;
    without planning the messages.
    """
    engine_tp = engine_tensor_model_parallel_size
    held_ops = _held(arch, layout, list(hf_shapes(arch)))
    most = 0
    for at in {
        tuple(_engine_ranks(layout, engine_tp, replicas, replica)) for replica in range(replicas)
    }:
        slices = {
            name: tuple(engine_slice(arch, name, engine_tp, rank) for rank in at)
            for name in held_ops
        }
        most = max(most, *_least(arch, held_ops, slices, itemsize))
    return most


def _share_of_a_bucket(
    arch: Architecture, names: Sequence[str], ranks: int, bucket_bytes: int, itemsize: int
) -> tuple[int, int]:
    """Return how many numbers that a message and the buffer of what has arrived may hold; a row of
    the widest tensor at least.
    """
    widest = max(
        (_per_index(arch, name, engine_slice(arch, name, 1, 0)[0]) for name in names), default=1
    )
    message = max(widest, bucket_bytes // MESSAGE_SHARE // itemsize) if ranks > 1 else 0
    capacity = bucket_bytes // itemsize - message
    if capacity < widest:
        least = widest * itemsize * (2 if ranks > 1 else 1)
        raise UserError(
            f"rollout.bucket_bytes={bucket_bytes} is too small for this model; it needs {least} "
            "at least"
        )
    return message, capacity


def _engine_ranks(layout: Layout, engine_tp: int, replicas: int, replica: int) -> list[int]:
    """Return the engine's tensor-parallel rank on each rank of a replica. Engines are blocks of
    consecutive ranks; Megatron counts tensor before data before pipeline ranks.
    """
    width, stages = layout.width, range(layout.pipeline_model_parallel_size)
    return [
        (place + width * (replica + replicas * p)) % engine_tp
        for p in stages
        for place in range(width)
    ]


def _held(arch: Architecture, layout: Layout, names: Sequence[str]) -> _Held:
    """Return of every tensor the intervals that ranks hold, disjoint, in the order of their start;
    no readers yet.
    """
    by_interval: dict[str, dict[tuple[int, int], TransferOp]] = {
        name: {} for name in hf_shapes(arch)
    }
    for pipeline in range(layout.pipeline_model_parallel_size):
        for place in range(layout.width):
            rank = pipeline * layout.width + place
            for virtual in range(layout.virtual_pipeline_model_parallel_size):
                for name, copies in _by_tensor(
                    plan(arch, layout, layout.at(place, pipeline, virtual))
                ).items():
                    start, stop = copies[0].hf_start, copies[-1].hf_stop
                    assert sum(copy.length for copy in copies) == stop - start, (
                        "the slices of a rank are neighbors"
                    )
                    numel = (stop - start) * _per_index(arch, name, copies[0].dim)
                    new = TransferOp(
                        name, copies[0].dim, start, stop, numel, (), (), len(copies) > 1
                    )
                    op = by_interval[name].get((start, stop), new)
                    if rank not in op.holders:
                        holders = (rank, *op.holders) if copies[0].primary else (*op.holders, rank)
                        by_interval[name][start, stop] = replace(op, holders=holders)
    return {
        name: [op for _, op in sorted(by_interval[name].items(), key=lambda item: item[0])]
        for name in names
    }


def _by_tensor(copies: Sequence[Copy]) -> dict[str, list[Copy]]:
    """Return a rank's copies by Hugging Face tensor, in the order of their start."""
    by_name: dict[str, list[Copy]] = {}
    for copy in sorted(copies, key=lambda copy: copy.hf_start):
        by_name.setdefault(copy.hf, []).append(copy)
    return by_name


def _per_index(arch: Architecture, name: str, dim: int) -> int:
    """Return the number of elements in one index of dimension ``dim``."""
    shape = hf_shapes(arch)[name]
    return math.prod(shape) // shape[dim]


def _least(arch: Architecture, held_ops: _Held, slices: _Slices, itemsize: int) -> tuple[int, ...]:
    """Return, per rank, the bytes of its slices less those of them that it holds."""
    ranks = range(len(next(iter(slices.values()), ())))
    missing = (
        (rank, op)
        for ops in held_ops.values()
        for op in ops
        for rank in ranks
        if rank not in op.holders
    )
    least = [0 for _ in ranks]
    for rank, op in missing:
        least[rank] += itemsize * op.overlap(slices[op.hf][rank]) * _per_index(arch, op.hf, op.dim)
    return tuple(least)


def _entries(
    arch: Architecture, held_ops: _Held, slices: _Slices, capacity: int, merged: tuple[str, ...]
) -> Iterator[_Planned]:
    """Yield every tensor whole where ``capacity`` numbers are enough on every rank, else each
    rank's slice in equal parts.
    """
    for name, keeps in slices.items():
        entry = BucketEntry(name, keeps)
        ops = _transfer_ops(held_ops[name], keeps)
        if max(_to_assemble(entry, ops, merged)) <= capacity:
            yield entry, ops
            continue
        length = max(stop - start for _, start, stop in keeps)
        number = -(-length // (capacity // _per_index(arch, name, keeps[0][0])))
        step = -(-length // number)
        for offset in range(0, length, step):
            part = tuple(
                (d, min(start + offset, stop), min(start + offset + step, stop))
                for d, start, stop in keeps
            )
            yield BucketEntry(name, part), _transfer_ops(held_ops[name], part)


def _transfer_ops(held_ops: Sequence[TransferOp], keeps: Sequence[Slice]) -> list[TransferOp]:
    """Return the held intervals of a tensor, cut where the slice of an engine rank begins or ends."""
    ops = []
    for op in held_ops:
        assert all(dim == op.dim for dim, _, _ in keeps), (
            "trainer and engine cut along the same dimension"
        )
        bounds = {op.start, op.stop, *(edge for _, *edges in keeps for edge in edges)}
        for start, stop in itertools.pairwise(
            sorted(edge for edge in bounds if op.start <= edge <= op.stop)
        ):
            part = op.cut(start, stop, ())
            readers = (
                rank
                for rank, slice_ in enumerate(keeps)
                if rank not in op.holders and part.overlap(slice_)
            )
            ops.append(replace(part, readers=tuple(readers)))
    return ops


def _to_assemble(
    entry: BucketEntry, ops: Sequence[TransferOp], merged: tuple[str, ...]
) -> list[int]:
    """Return how many numbers each rank has to put together in a buffer: none where one parameter
    of its own has the slice as it is.
    """
    needs = []
    for rank, slice_ in enumerate(entry.slices):
        of_rank = [op for op in ops if op.overlap(slice_)]
        in_place = entry.hf not in merged
        in_place = in_place and all(rank in op.holders and not op.interleaved for op in of_rank)
        in_place = in_place and len({op.holders for op in of_rank}) == 1
        needs.append(0 if in_place else sum(op.numel for op in of_rank))
    return needs


def _pack(
    entries: Iterable[_Planned], capacity: int, merged: tuple[str, ...]
) -> Iterator[list[_Planned]]:
    """Pack entries in order, as many per bucket as fit on every rank."""
    bucket: list[_Planned] = []
    used: list[int] = []
    for entry, ops in entries:
        needs = _to_assemble(entry, ops, merged)
        total = _sum([used, needs]) if bucket else needs
        if bucket and (max(total) > capacity or bucket[-1][0].hf == entry.hf):
            yield bucket
            bucket, total = [], needs
        bucket.append((entry, ops))
        used = total
    if bucket:
        yield bucket


def _sum(needs: Iterable[list[int]]) -> list[int]:
    """Add rank by rank."""
    return [sum(of_rank) for of_rank in zip(*needs, strict=True)]


def _messages(ops: Sequence[TransferOp], limit: int) -> Iterator[Message]:
    """Put operations of one owner and the same readers together, in messages of at most ``limit``
    numbers (a row at least).
    """
    routes: dict[tuple[int, tuple[int, ...]], list[TransferOp]] = {}
    for op in ops:
        if op.readers:
            step = max(1, limit // (op.numel // (op.stop - op.start)))
            cuts = (
                op.cut(at, min(at + step, op.stop), op.readers)
                for at in range(op.start, op.stop, step)
            )
            routes.setdefault((op.holders[0], op.readers), []).extend(cuts)
    for (owner, readers), together in routes.items():
        message: list[TransferOp] = []
        for op in together:
            if message and sum(o.numel for o in message) + op.numel > limit:
                yield Message(owner, readers, tuple(message))
                message = []
            message.append(op)
        yield Message(owner, readers, tuple(message))


def engine_slice(arch: Architecture, name: str, tp: int, rank: int) -> Slice:
    """Return the slice of tensor ``name`` that engine rank ``rank`` of ``tp`` keeps, by the cut in
    the weight table.

    The dimension is the one Megatron cuts along, too: output rows, or input columns of o_proj and
    down_proj.
    """
    shape, cut = hf_shapes(arch)[name], engine_cuts(arch)[name]
    dim = 1 if cut == "columns" else 0
    if cut == "whole":
        return dim, 0, shape[dim]
    if cut == "heads" and tp > arch.num_query_groups:
        head = (
            rank * arch.num_query_groups // tp
        )  # fewer key/value heads than ranks: each is repeated
        return dim, head * arch.kv_channels, (head + 1) * arch.kv_channels
    if cut == "vocabulary":
        per_rank = -(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tp
        return dim, min(rank * per_rank, shape[0]), min((rank + 1) * per_rank, shape[0])
    return dim, rank * shape[dim] // tp, (rank + 1) * shape[dim] // tp
