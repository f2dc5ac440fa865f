"""The plan of a weight synchronization: which bytes go from which trainer rank to which other,
bucket by bucket. Pure.

Every engine rank gets the slice of each Hugging Face tensor that it keeps by vLLM's rule for dense
models (the whole tensor if an engine has one rank). What it already holds as a trainer rank is not
sent. The rest is sent once, by its owner, so the bytes that a rank receives are the least possible.
There are two passes: a list of :class:`TransferOp` for each tensor, then the operations packed into
buckets. A tensor that is larger than a bucket is cut into several entries.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.config.rules import VOCABULARY_MULTIPLE
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.layout import Layout
from megatron_dcpo.weights.planner import Copy, plan
from megatron_dcpo.weights.table import engine_cuts, hf_shapes, is_constant

BUCKET_BYTES = 512 * 2**20
Slice = tuple[int, int, int]  # dimension, start, stop
# One part in so many of a bucket is for the message in transit, the rest for values that arrived.
MESSAGE_SHARE = 8


@dataclass(frozen=True)
class TransferOp:
    """``hf[start:stop]`` along ``dim``, the ranks of the replica that hold it (the owner first) and
    the ranks that need it.

    If it is ``interleaved``, Megatron keeps it in several pieces (query groups), so that a holder
    has to assemble it as well.
    """

    hf: str
    dim: int
    start: int
    stop: int
    numel: int
    holders: tuple[int, ...]
    readers: tuple[int, ...]
    interleaved: bool

    @property
    def per_index(self) -> int:
        """Return the number of elements in one index of the dimension."""
        return self.numel // (self.stop - self.start)

    def cut(self, start: int, stop: int, readers: tuple[int, ...]) -> TransferOp:
        """Return ``hf[start:stop]`` of this operation, for ``readers``."""
        numel = self.per_index * (stop - start)
        return replace(self, start=start, stop=stop, numel=numel, readers=readers)

    def overlap(self, slice_: Slice) -> int:
        """Return how many indices of this operation are in a slice of the tensor."""
        _, start, stop = slice_
        return max(0, min(self.stop, stop) - max(self.start, start))


@dataclass(frozen=True)
class Message:
    """Operations whose values are sent flat, one after another, from ``owner`` to ``readers``
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
    """Tensor ``hf``, or the part of it that a bucket holds. ``slices`` has the slice that each rank
    keeps.
    """

    hf: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class Bucket:
    """Entries that the engine gets in one call, at most one of each tensor, and the messages that
    bring the values that a rank lacks.
    """

    entries: tuple[BucketEntry, ...]
    messages: tuple[Message, ...]


_Held = dict[str, list[TransferOp]]  # the intervals of every tensor that ranks hold
_Slices = dict[str, tuple[Slice, ...]]  # the slice of every tensor that each rank's engine keeps
_Planned = tuple[BucketEntry, list[TransferOp]]


@dataclass(frozen=True)
class EngineRanks:
    """The engines on the ranks of one ``replica`` of the trainer, out of ``replicas``. Each replica
    synchronizes within itself. Engines are blocks of ``tensor_model_parallel_size`` consecutive
    ranks, whatever replica these belong to.
    """

    tensor_model_parallel_size: int = 1
    replicas: int = 1
    replica: int = 0

    def on(self, layout: Layout) -> tuple[int, ...]:
        """Return the engine's tensor-parallel rank on each rank of the replica. Megatron counts
        tensor before data before pipeline ranks.
        """
        ranks = []
        for stage in range(layout.pipeline_model_parallel_size):
            first = layout.width * (self.replica + self.replicas * stage)
            for part in range(layout.width):
                ranks.append((first + part) % self.tensor_model_parallel_size)
        return tuple(ranks)


@dataclass(frozen=True)
class ReshardPlan:
    """The bytes that one synchronization moves within a replica. Tuples are indexed by the rank
    within the replica.

    received: by the messages.
    least: the bytes that a rank needs and does not hold, computed independently of the messages.
    least_whole: the same if every rank were given whole tensors.
    assembled: the largest buffer in which a rank assembles slices.
    message: the largest message.
    constants: the tensors that no bucket has, because every rank has them whole.
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
    constants: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Return a rank's extra memory during the synchronization, at most ``bucket_bytes``."""
        return self.assembled + self.message

    @functools.cached_property
    def checksum(self) -> str:
        """Return a number that is equal on ranks that will move the same bytes."""
        return hashlib.sha256(repr((self.itemsize, self.buckets)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def reshard_plan(
    arch: Architecture,
    layout: Layout,
    engines: EngineRanks,
    bucket_bytes: int = BUCKET_BYTES,
    itemsize: int = 2,
    only: tuple[str, ...] | None = None,
    merged: tuple[str, ...] = (),
) -> ReshardPlan:
    """Plan the synchronization of ``arch`` from ``layout`` into ``engines`` on the same ranks.
    Deterministic; cached.

    Args:
        bucket_bytes: bound of a rank's extra memory, with the message in transit.
        itemsize: bytes per number of the trainer's parameters.
        only: the tensors to synchronize (export of one file); all by default.
        merged: tensors to which something is added on the way, so that no parameter is passed on as
            it is.

    The engine's tensor-parallel size must divide the model (``config.rules.check_engine_size``).
    Raises :class:`UserError` if a bucket cannot hold a single row of one of its tensors.
    """
    engine_tp = engines.tensor_model_parallel_size
    names = [name for name in _moving(arch) if only is None or name in only]
    constants = [name for name in hf_shapes(arch) if is_constant(name)]
    ranks = range(layout.width * layout.pipeline_model_parallel_size)
    slices = _engine_slices(arch, names, engine_tp, engines.on(layout))
    whole = _engine_slices(arch, names, 1, [0 for _ in ranks])
    held_ops = _held(arch, layout, names)
    message_limit, capacity = _share_of_a_bucket(
        arch=arch, names=names, ranks=len(ranks), bucket_bytes=bucket_bytes, itemsize=itemsize
    )
    entries = _entries(
        arch=arch, held_ops=held_ops, slices=slices, capacity=capacity, merged=merged
    )
    buckets = []
    assembled = 0
    for packed in _pack(entries, capacity, merged):
        ops = [op for _, entry_ops in packed for op in entry_ops]
        bucket = Bucket(
            entries=tuple(entry for entry, _ in packed),
            messages=tuple(_messages(ops, message_limit)),
        )
        buckets.append(bucket)
        needs = [_to_assemble(entry, entry_ops, merged) for entry, entry_ops in packed]
        assembled = max(assembled, *_sum(needs))
    messages = [message for bucket in buckets for message in bucket.messages]
    received = []
    for rank in ranks:
        numel = sum(message.numel for message in messages if rank in message.readers)
        received.append(itemsize * numel)
    return ReshardPlan(
        bucket_bytes=bucket_bytes,
        itemsize=itemsize,
        replicas=engines.replicas,
        engine_tensor_model_parallel_size=engine_tp,
        buckets=tuple(buckets),
        received=tuple(received),
        least=_least(arch, held_ops, slices, len(ranks), itemsize),
        least_whole=_least(arch, held_ops, whole, len(ranks), itemsize),
        assembled=itemsize * assembled,
        message=itemsize * max((message.numel for message in messages), default=0),
        constants=tuple(name for name in constants if only is None or name in only),
    )


def _moving(arch: Architecture) -> list[str]:
    """Return the tensors that change from one synchronization to the next."""
    return [name for name in hf_shapes(arch) if not is_constant(name)]


def _engine_slices(
    arch: Architecture, names: Iterable[str], tp: int, engine_ranks: Sequence[int]
) -> _Slices:
    """Return the slices of every tensor that the given ranks of an engine of size ``tp`` keep."""
    slices = {}
    of_an_engine = sorted(set(engine_ranks))
    for name in names:
        kept = {rank: engine_slice(arch, name, tp, rank) for rank in of_an_engine}
        slices[name] = tuple(kept[rank] for rank in engine_ranks)
    return slices


@functools.lru_cache(maxsize=256)  # many plans differ in other things
def most_received(
    arch: Architecture,
    layout: Layout,
    engine_tensor_model_parallel_size: int,
    replicas: int,
    itemsize: int,
) -> int:
    """Return the bytes that the busiest receiving rank of all replicas gets in a synchronization,
    without planning the messages.
    """
    engine_tp = engine_tensor_model_parallel_size
    held_ops = _held(arch, layout, _moving(arch))
    placements = set()
    for replica in range(replicas):
        placements.add(EngineRanks(engine_tp, replicas, replica).on(layout))
    most = 0
    for engine_ranks in placements:
        slices = _engine_slices(arch, held_ops, engine_tp, engine_ranks)
        most = max(most, *_least(arch, held_ops, slices, len(engine_ranks), itemsize))
    return most


def _share_of_a_bucket(
    arch: Architecture, names: Sequence[str], ranks: int, bucket_bytes: int, itemsize: int
) -> tuple[int, int]:
    """Return how many numbers a message and the buffer of arrived values may hold, which is at
    least a row of the widest tensor.
    """
    widest = 1
    if names:
        widest = max(
            _per_index(arch, name, engine_slice(arch, name, tp=1, rank=0)[0]) for name in names
        )
    message = 0
    if ranks > 1:
        message = max(widest, bucket_bytes // MESSAGE_SHARE // itemsize)
    capacity = bucket_bytes // itemsize - message
    if capacity < widest:
        least = widest * itemsize
        if ranks > 1:
            least *= 2
        raise UserError(
            f"rollout.bucket_bytes={bucket_bytes} is too small for this model; it needs {least} "
            "at least"
        )
    return message, capacity


def _held(arch: Architecture, layout: Layout, names: Sequence[str]) -> _Held:
    """Return the intervals of every tensor that ranks hold: disjoint, in the order of their start,
    still without readers.
    """
    by_interval: dict[str, dict[tuple[int, int], TransferOp]] = {
        name: {} for name in hf_shapes(arch)
    }
    for rank, copies_of in _copies_of_ranks(arch, layout):
        for name, copies in copies_of.items():
            start = copies[0].hf_start
            stop = copies[-1].hf_stop
            contiguous = sum(copy.length for copy in copies) == stop - start
            assert contiguous, "the slices of a rank are neighbors"
            op = by_interval[name].get((start, stop))
            if op is None:
                op = TransferOp(
                    hf=name,
                    dim=copies[0].dim,
                    start=start,
                    stop=stop,
                    numel=(stop - start) * _per_index(arch, name, copies[0].dim),
                    holders=(),
                    readers=(),
                    interleaved=len(copies) > 1,
                )
            if rank in op.holders:
                continue
            holders = (*op.holders, rank)
            if copies[0].primary:
                holders = (rank, *op.holders)
            by_interval[name][start, stop] = replace(op, holders=holders)
    held = {}
    for name in names:
        intervals = sorted(by_interval[name])
        held[name] = [by_interval[name][interval] for interval in intervals]
    return held


def _copies_of_ranks(
    arch: Architecture, layout: Layout
) -> Iterator[tuple[int, dict[str, list[Copy]]]]:
    """Yield each rank of the replica and its copies by tensor, one model chunk at a time."""
    for pipeline in range(layout.pipeline_model_parallel_size):
        for part in range(layout.width):
            rank = pipeline * layout.width + part
            for virtual in range(layout.virtual_pipeline_model_parallel_size):
                copies = plan(arch, layout, layout.at(part, pipeline, virtual))
                yield rank, _by_tensor(copies)


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


def _least(
    arch: Architecture, held_ops: _Held, slices: _Slices, ranks: int, itemsize: int
) -> tuple[int, ...]:
    """Return the bytes of each rank's slices that it does not hold."""
    least = [0] * ranks
    for name, ops in held_ops.items():
        for op in ops:
            index_bytes = itemsize * _per_index(arch, name, op.dim)
            for rank in range(ranks):
                if rank not in op.holders:
                    least[rank] += index_bytes * op.overlap(slices[name][rank])
    return tuple(least)


def _entries(
    arch: Architecture, held_ops: _Held, slices: _Slices, capacity: int, merged: tuple[str, ...]
) -> Iterator[_Planned]:
    """Yield every tensor whole if ``capacity`` numbers are enough for it on every rank, otherwise
    each rank's slice in equal parts.
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
            part = []
            for dim, start, stop in keeps:
                first = min(start + offset, stop)
                last = min(start + offset + step, stop)
                part.append((dim, first, last))
            yield BucketEntry(name, tuple(part)), _transfer_ops(held_ops[name], part)


def _transfer_ops(held_ops: Sequence[TransferOp], keeps: Sequence[Slice]) -> list[TransferOp]:
    """Return the held intervals of a tensor, cut at the beginning and end of every engine rank's
    slice.
    """
    edges = set()
    for _, start, stop in keeps:
        edges |= {start, stop}
    ops = []
    for op in held_ops:
        same_dim = all(dim == op.dim for dim, _, _ in keeps)
        assert same_dim, "trainer and engine cut along the same dimension"
        inside = {edge for edge in edges if op.start < edge < op.stop}
        for start, stop in itertools.pairwise(sorted({op.start, op.stop} | inside)):
            part = op.cut(start, stop, ())
            readers = []
            for rank, slice_ in enumerate(keeps):
                if rank not in op.holders and part.overlap(slice_):
                    readers.append(rank)
            ops.append(replace(part, readers=tuple(readers)))
    return ops


def _to_assemble(
    entry: BucketEntry, ops: Sequence[TransferOp], merged: tuple[str, ...]
) -> list[int]:
    """Return how many numbers each rank has to assemble in a buffer: none if one of its parameters
    has the slice as it is.
    """
    needs = []
    for rank, slice_ in enumerate(entry.slices):
        rank_ops = [op for op in ops if op.overlap(slice_)]
        held_as_is = all(rank in op.holders and not op.interleaved for op in rank_ops)
        one_parameter = len({op.holders for op in rank_ops}) == 1
        if held_as_is and one_parameter and entry.hf not in merged:
            needs.append(0)
        else:
            needs.append(sum(op.numel for op in rank_ops))
    return needs


def _pack(
    entries: Iterable[_Planned], capacity: int, merged: tuple[str, ...]
) -> Iterator[list[_Planned]]:
    """Pack entries in order, as many per bucket as fit on every rank."""
    bucket: list[_Planned] = []
    used: list[int] = []
    for entry, ops in entries:
        needs = _to_assemble(entry, ops, merged)
        total = needs
        if bucket:
            total = _sum([used, needs])
            if max(total) > capacity or bucket[-1][0].hf == entry.hf:
                yield bucket
                bucket = []
                total = needs
        bucket.append((entry, ops))
        used = total
    if bucket:
        yield bucket


def _sum(needs: Iterable[list[int]]) -> list[int]:
    """Add rank by rank."""
    return [sum(rank_ops) for rank_ops in zip(*needs, strict=True)]


def _messages(ops: Sequence[TransferOp], limit: int) -> Iterator[Message]:
    """Put operations of one owner and the same readers together, in messages of at most ``limit``
    numbers (but at least a row).
    """
    routes: dict[tuple[int, tuple[int, ...]], list[TransferOp]] = {}
    for op in ops:
        if not op.readers:
            continue
        route = routes.setdefault((op.holders[0], op.readers), [])
        step = max(1, limit // op.per_index)
        for start in range(op.start, op.stop, step):
            route.append(op.cut(start, min(start + step, op.stop), op.readers))
    for (owner, readers), together in routes.items():
        message: list[TransferOp] = []
        numel = 0
        for op in together:
            if message and numel + op.numel > limit:
                yield Message(owner=owner, readers=readers, ops=tuple(message))
                message = []
                numel = 0
            message.append(op)
            numel += op.numel
        yield Message(owner=owner, readers=readers, ops=tuple(message))


def engine_slice(arch: Architecture, name: str, tp: int, rank: int) -> Slice:
    """Return the slice of tensor ``name`` that engine rank ``rank`` of ``tp`` keeps, by the cut in
    the weight table.

    Megatron cuts along the same dimension: output rows, or the input columns of o_proj and
    down_proj.
    """
    shape = hf_shapes(arch)[name]
    cut = engine_cuts(arch)[name]
    dim = 1 if cut == "columns" else 0
    if cut == "whole":
        return dim, 0, shape[dim]
    if cut == "heads" and tp > arch.num_query_groups:
        # fewer key/value heads than ranks: each head is on several ranks
        head = rank * arch.num_query_groups // tp
        return dim, head * arch.kv_channels, (head + 1) * arch.kv_channels
    if cut == "vocabulary":
        per_rank = -(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tp
        return dim, min(rank * per_rank, shape[0]), min((rank + 1) * per_rank, shape[0])
    return dim, rank * shape[dim] // tp, (rank + 1) * shape[dim] // tp
