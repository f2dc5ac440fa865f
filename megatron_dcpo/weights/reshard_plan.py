"""The plan of a weight synchronisation: which bytes go from which trainer rank to which, bucket by bucket. Pure.

Every engine rank gets, of every Hugging Face tensor, the slice it keeps (the whole tensor with an engine of one rank).
What it holds already as a trainer rank does not travel; the rest travels once from its owner, so the bytes a rank
receives are the least possible. A tensor that is larger than a bucket is cut into chunks.

Which slice of each Hugging Face tensor a tensor-parallel engine rank keeps. Pure; vLLM's rule for dense models.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.planner import Coordinates, Copy, Layout, plan
from megatron_dcpo.weights.table import hf_shapes

BUCKET_BYTES = 512 * 2**20
MESSAGE_SHARE = 8  # of a bucket, one part in so many is for the message on its way, the rest for what has arrived


@dataclass(frozen=True)
class Part:
    """``hf[start:stop]`` along ``dim``, the ranks of the replica that hold it (the owner first) and those that need it.

    ``interleaved``: Megatron keeps it in several places (query groups), so a holder has to put it together as well.
    """

    hf: str
    dim: int
    start: int
    stop: int
    numel: int
    holders: tuple[int, ...]
    readers: tuple[int, ...]
    interleaved: bool


@dataclass(frozen=True)
class Message:
    """Parts sent flat, one after the other, from ``owner`` to ``readers`` (ranks within the replica)."""

    owner: int
    readers: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts)


@dataclass(frozen=True)
class Chunk:
    """Tensor ``hf``, or as much of it as a bucket holds. ``slices``: (dimension, start, stop) of it on every rank."""

    hf: str
    slices: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Bucket:
    """Chunks handed to the engine in one call, of every tensor at most one; and the messages that bring what a rank
    misses of them."""

    chunks: tuple[Chunk, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class ReshardPlan:
    """What one synchronisation moves within a replica. Bytes; tuples are indexed by the rank within the replica.

    ``received``: by the messages; ``least``: what a rank needs less what it holds, computed apart from them;
    ``least_whole``: the same if every rank were given whole tensors. ``assembled``: the largest buffer in which a rank
    puts slices together; ``message``: the largest message.
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
        """Extra memory of a rank during the synchronisation; at most ``bucket_bytes``."""
        return self.assembled + self.message

    @functools.cached_property
    def checksum(self) -> str:
        """Equal on ranks that will move the same bytes."""
        return hashlib.sha256(repr((self.itemsize, self.buckets)).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=64)
def reshard_plan(
    arch: Architecture,
    layout: Layout,
    engine_tensor_model_parallel_size: int = 1,
    replicas: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    itemsize: int = 2,
    wanted: tuple[str, ...] | None = None,
    replica: int = 0,
) -> ReshardPlan:
    """Plan the synchronisation of ``arch`` from ``layout`` into engines on the same ranks. Deterministic; cached.

    Args:
        replicas, replica: data-parallel replicas of the trainer and the one in question; each synchronises within
            itself. Engines are blocks of consecutive ranks, whatever replica these belong to.
        bucket_bytes: bound of the extra memory of a rank, the message on its way included.
        itemsize: bytes per number of the trainer's parameters.
        wanted: only these tensors (export of one file); all by default.

    Raises :class:`UserError` when the engine's tensor-parallel size does not divide the model, and when a bucket cannot
    even hold a row of one of its tensors.
    """
    check_engine(arch, engine_tensor_model_parallel_size)
    names = [name for name in hf_shapes(arch) if wanted is None or name in wanted]
    ranks = layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    at = _engine_ranks(layout, engine_tensor_model_parallel_size, replicas, replica)
    slices = {n: tuple(engine_slice(arch, n, engine_tensor_model_parallel_size, rank) for rank in at) for n in names}
    whole = {name: tuple(engine_slice(arch, name, 1, 0) for _ in at) for name in names}
    held = _held(arch, layout, names)
    message, capacity = _share_of_a_bucket(arch, names, ranks, bucket_bytes, itemsize)
    buckets, assembled = [], 0
    for filled in _fill(_chunks(arch, held, slices, capacity), capacity):
        messages = _messages([part for chunk in filled for part in chunk.parts], message)
        buckets.append(Bucket(tuple(chunk.chunk for chunk in filled), tuple(messages)))
        assembled = max(
            assembled, *(sum(needs) for needs in zip(*(chunk.to_assemble for chunk in filled), strict=True))
        )
    sent = [message for bucket in buckets for message in bucket.messages]
    return ReshardPlan(
        bucket_bytes=bucket_bytes,
        itemsize=itemsize,
        replicas=replicas,
        engine_tensor_model_parallel_size=engine_tensor_model_parallel_size,
        buckets=tuple(buckets),
        received=tuple(itemsize * sum(m.numel for m in sent if rank in m.readers) for rank in range(ranks)),
        least=_least(arch, held, slices, itemsize),
        least_whole=_least(arch, held, whole, itemsize),
        assembled=itemsize * assembled,
        message=itemsize * max((m.numel for m in sent), default=0),
    )


def most_received(
    arch: Architecture, layout: Layout, engine_tensor_model_parallel_size: int, replicas: int, itemsize: int
) -> int:
    """Bytes that the rank receiving most gets in a synchronisation, over all replicas; without planning the messages."""
    engine_tp = engine_tensor_model_parallel_size
    check_engine(arch, engine_tp)
    held = _held(arch, layout, list(hf_shapes(arch)))
    most = 0
    for at in {tuple(_engine_ranks(layout, engine_tp, replicas, replica)) for replica in range(replicas)}:
        slices = {name: tuple(engine_slice(arch, name, engine_tp, rank) for rank in at) for name in held}
        most = max(most, *_least(arch, held, slices, itemsize))
    return most


def _share_of_a_bucket(
    arch: Architecture, names: Sequence[str], ranks: int, bucket_bytes: int, itemsize: int
) -> tuple[int, int]:
    """Numbers that a message and the buffer of what has arrived may hold; a row of the widest tensor at least."""
    widest = max((_row(arch, name) for name in names), default=1)
    message = max(widest, bucket_bytes // MESSAGE_SHARE // itemsize) if ranks > 1 else 0
    capacity = bucket_bytes // itemsize - message
    if capacity < widest:
        least = widest * itemsize * (2 if ranks > 1 else 1)
        raise UserError(f"rollout.bucket_bytes={bucket_bytes} is too small for this model; it needs {least} at least")
    return message, capacity


def _row(arch: Architecture, name: str) -> int:
    """Numbers in one row (one column, where the tensor is cut along columns)."""
    shape, (dim, _, _) = hf_shapes(arch)[name], engine_slice(arch, name, 1, 0)
    return math.prod(shape) // shape[dim]


def _engine_ranks(layout: Layout, engine_tp: int, replicas: int, replica: int) -> list[int]:
    """The engine's tensor-parallel rank on each rank of a replica. Engines are blocks of consecutive ranks; Megatron
    counts tensor before data before pipeline ranks."""
    tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    return [(t + tp * (replica + replicas * p)) % engine_tp for p in range(pp) for t in range(tp)]


@dataclass(frozen=True)
class _Held:
    """What ranks hold of a tensor as one interval; ``holders``: the owner first."""

    copy: Copy
    interleaved: bool
    holders: tuple[int, ...]


def _held(arch: Architecture, layout: Layout, names: Sequence[str]) -> dict[str, list[_Held]]:
    """Of every tensor the intervals that ranks hold, disjoint, in the order of their start."""
    found: dict[tuple[str, int, int], tuple[Copy, bool, list[int]]] = {}
    for pipeline in range(layout.pipeline_model_parallel_size):
        for tensor in range(layout.tensor_model_parallel_size):
            rank = pipeline * layout.tensor_model_parallel_size + tensor
            for virtual in range(layout.virtual_pipeline_model_parallel_size):
                for copy, interleaved in _merged(plan(arch, layout, Coordinates(tensor, pipeline, virtual))):
                    key = (copy.hf, copy.hf_start, copy.hf_stop)
                    _, _, holders = found.setdefault(key, (copy, interleaved, []))
                    if rank not in holders:
                        holders.insert(0 if copy.primary else len(holders), rank)
    held: dict[str, list[_Held]] = {name: [] for name in names}
    for key in sorted(found):
        copy, interleaved, holders = found[key]
        if copy.hf in held:
            held[copy.hf].append(_Held(copy, interleaved, tuple(holders)))
    return held


def _merged(copies: Sequence[Copy]) -> Iterator[tuple[Copy, bool]]:
    """What a rank holds of each tensor as one interval, and whether it is made of several copies."""
    by_name: dict[str, list[Copy]] = {}
    for copy in copies:
        by_name.setdefault(copy.hf, []).append(copy)
    for group in by_name.values():
        group.sort(key=lambda copy: copy.hf_start)
        first, stop = group[0], group[0].hf_stop
        for copy in group[1:]:
            assert copy.hf_start == stop, "the parts of a rank are neighbours"
            stop = copy.hf_stop
        joined = Copy(first.hf, first.hf_start, stop, first.megatron, first.start, first.dim, first.primary)
        yield joined, len(group) > 1


def _parts(
    arch: Architecture, held: Sequence[_Held], slices: Sequence[tuple[int, int, int]], name: str
) -> Iterator[Part]:
    """The held intervals of a tensor, cut where the slice of an engine rank begins or ends."""
    shape = hf_shapes(arch)[name]
    for interval in held:
        copy = interval.copy
        per_index = math.prod(shape) // shape[copy.dim]
        assert all(dim == copy.dim for dim, _, _ in slices), "trainer and engine cut along the same dimension"
        bounds = {copy.hf_start, copy.hf_stop, *(edge for _, *edges in slices for edge in edges)}
        edges = sorted(edge for edge in bounds if copy.hf_start <= edge <= copy.hf_stop)
        for start, stop in itertools.pairwise(edges):
            readers = tuple(
                rank
                for rank, wanted in enumerate(slices)
                if rank not in interval.holders and _overlap(wanted, start, stop)
            )
            numel = (stop - start) * per_index
            yield Part(name, copy.dim, start, stop, numel, interval.holders, readers, interval.interleaved)


def _overlap(wanted: tuple[int, int, int], start: int, stop: int) -> int:
    """Indices of ``start:stop`` in an engine rank's slice."""
    return max(0, min(stop, wanted[2]) - max(start, wanted[1]))


def _least(
    arch: Architecture,
    held: dict[str, list[_Held]],
    slices: dict[str, tuple[tuple[int, int, int], ...]],
    itemsize: int,
) -> tuple[int, ...]:
    """Per rank, the bytes of its slices less those of them that it holds."""
    ranks = range(len(next(iter(slices.values()), ())))
    least = [0 for _ in ranks]
    for name, intervals in held.items():
        shape = hf_shapes(arch)[name]
        for rank in ranks:
            for interval in intervals:
                if rank not in interval.holders:
                    copy = interval.copy
                    count = _overlap(slices[name][rank], copy.hf_start, copy.hf_stop)
                    least[rank] += itemsize * count * math.prod(shape) // shape[copy.dim]
    return tuple(least)


@dataclass(frozen=True)
class _PlannedChunk:
    """``to_assemble``: numbers that each rank has to put together in a buffer."""

    chunk: Chunk
    parts: tuple[Part, ...]
    to_assemble: tuple[int, ...]


def _chunks(
    arch: Architecture,
    held: dict[str, list[_Held]],
    slices: dict[str, tuple[tuple[int, int, int], ...]],
    capacity: int,
) -> Iterator[_PlannedChunk]:
    """Every tensor whole where ``capacity`` numbers are enough on every rank, else each rank's slice in equal parts."""
    for name, wanted in slices.items():
        whole = _planned(arch, held[name], Chunk(name, wanted))
        if max(whole.to_assemble) <= capacity:
            yield whole
            continue
        length = max(stop - start for _, start, stop in wanted)
        number = -(-length // (capacity // _row(arch, name)))
        step = -(-length // number)
        for offset in range(0, length, step):
            part = tuple(
                (dim, min(start + offset, stop), min(start + offset + step, stop)) for dim, start, stop in wanted
            )
            yield _planned(arch, held[name], Chunk(name, part))


def _planned(arch: Architecture, held: Sequence[_Held], chunk: Chunk) -> _PlannedChunk:
    parts = tuple(_parts(arch, held, chunk.slices, chunk.hf))
    needs = tuple(_to_assemble(parts, chunk.slices, rank) for rank in range(len(chunk.slices)))
    return _PlannedChunk(chunk, parts, needs)


def _to_assemble(parts: Sequence[Part], slices: Sequence[tuple[int, int, int]], rank: int) -> int:
    """Numbers that a rank has to put together in a buffer: none where one parameter of its own has the slice as it is."""
    mine = [part for part in parts if _overlap(slices[rank], part.start, part.stop)]
    whole = all(rank in part.holders and not part.interleaved for part in mine)
    return 0 if whole and len({part.holders for part in mine}) == 1 else sum(part.numel for part in mine)


def _fill(chunks: Iterable[_PlannedChunk], capacity: int) -> Iterator[list[_PlannedChunk]]:
    """Chunks in order, as many per bucket as fit on every rank."""
    bucket: list[_PlannedChunk] = []
    used: list[int] = []
    for chunk in chunks:
        total = [a + b for a, b in zip(used or [0] * len(chunk.to_assemble), chunk.to_assemble, strict=True)]
        if bucket and (max(total) > capacity or bucket[-1].chunk.hf == chunk.chunk.hf):
            yield bucket
            bucket, total = [], list(chunk.to_assemble)
        bucket.append(chunk)
        used = total
    if bucket:
        yield bucket


def _messages(parts: Sequence[Part], limit: int) -> Iterator[Message]:
    """Parts of one owner and the same readers together, in messages of at most ``limit`` numbers (one row at least)."""
    routes: dict[tuple[int, tuple[int, ...]], list[Part]] = {}
    for part in parts:
        if part.readers:
            routes.setdefault((part.holders[0], part.readers), []).append(part)
    for (owner, readers), together in routes.items():
        open_: list[Part] = []
        size = 0
        for part in together:
            for piece in _cut(part, limit):
                if open_ and size + piece.numel > limit:
                    yield Message(owner, readers, tuple(open_))
                    open_, size = [], 0
                open_.append(piece)
                size += piece.numel
        if open_:
            yield Message(owner, readers, tuple(open_))


def _cut(part: Part, limit: int) -> Iterator[Part]:
    per_index = part.numel // (part.stop - part.start)
    step = max(1, limit // per_index)
    for start in range(part.start, part.stop, step):
        stop = min(start + step, part.stop)
        numel = (stop - start) * per_index
        yield Part(part.hf, part.dim, start, stop, numel, part.holders, part.readers, part.interleaved)


VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to a multiple of this before it cuts it


def check_engine(arch: Architecture, tensor_model_parallel_size: int) -> None:
    """Raise :class:`UserError` for an engine tensor-parallel size that does not divide the model."""
    tp, groups = tensor_model_parallel_size, arch.num_query_groups
    for what, size in (("attention heads", arch.num_attention_heads), ("ffn_hidden_size", arch.ffn_hidden_size)):
        if size % tp:
            raise UserError(
                f"rollout.tensor_model_parallel_size={tp} does not divide the model's {size} {what}; "
                f"choose a divisor of {size}"
            )
    if max(tp, groups) % min(tp, groups):
        raise UserError(
            f"rollout.tensor_model_parallel_size={tp} neither divides the model's {groups} key/value heads nor is a "
            "multiple of them"
        )
    padded = -(-arch.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded % tp:
        raise UserError(f"rollout.tensor_model_parallel_size={tp} does not divide the padded vocabulary of {padded}")


def engine_slice(arch: Architecture, name: str, tp: int, rank: int) -> tuple[int, int, int]:
    """(dimension, start, stop) of tensor ``name`` on engine rank ``rank`` of ``tp``; norms are kept whole.

    The dimension is the one Megatron cuts along, too: output rows, or input columns of o_proj and down_proj.
    """
    shape, kind = hf_shapes(arch)[name], name.split(".")[-2]
    dim = 1 if kind in ("o_proj", "down_proj") else 0
    if kind.endswith("norm"):
        return dim, 0, shape[dim]
    if kind in ("k_proj", "v_proj") and tp > arch.num_query_groups:
        head = rank * arch.num_query_groups // tp  # fewer key/value heads than ranks: each is repeated
        return dim, head * arch.kv_channels, (head + 1) * arch.kv_channels
    if kind in ("embed_tokens", "lm_head"):
        per_rank = -(-shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE // tp
        return dim, min(rank * per_rank, shape[0]), min((rank + 1) * per_rank, shape[0])
    return dim, rank * shape[dim] // tp, (rank + 1) * shape[dim] // tp
