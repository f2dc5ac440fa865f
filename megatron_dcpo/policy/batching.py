"""From judged responses to micro-batches: balanced over data-parallel ranks, equal in number,
padded or packed.

Logits at position p score the token at p + 1; ``MicroBatch.rows`` therefore points at the position
*before* each response token, and every per-token array (advantage, block id, weight) is laid out
like the *labels*.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_dcpo.policy.context_parallel import places_of_rank, positions_of, tokens_of_rank
from megatron_dcpo.policy.routing_replay import collate_experts
from megatron_dcpo.runtime.device import capabilities, to_device
from megatron_dcpo.types import MicroBatch, TokenSequence, TrainingSample

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip


# the columns of a micro-batch that the loss reads, one value for each response token
PER_TOKEN = {
    "advantages": torch.float32,
    "block_ids": torch.int64,
    "weights": torch.float32,
    "engine_logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "teacher_logprobs": torch.float32,
}


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's parameters of packed sequences, and their ``bounds`` on the host: a layer that
    reads ``cu_seqlens_q`` waits for the device.
    """

    bounds: tuple[int, ...] = ()


def sequence_length(sample: TrainingSample) -> int:
    """Return the number of tokens of a sample's forward pass."""
    return sample.length


def assign_to_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal samples over data-parallel ranks, longest first and reversing the direction each round:
    counts differ by at most one, and tokens are nearly equal.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for position, index in enumerate(longest_first(lengths)):
        turn, rank = divmod(position, ranks)
        if turn % 2 == 1:
            rank = ranks - 1 - rank
        shares[rank].append(index)
    return shares


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices of ``lengths`` from longest to shortest, equal lengths in their order."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def split_micro_batches(
    lengths_of_rank: Sequence[Sequence[int]],
    rank: int,
    *,
    micro_batch_size: int,
    max_tokens: int,
    packing: bool,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Return this rank's micro-batches as lists of indices into its samples. Their number is the
    same on every rank and a multiple of ``multiple_of``, as interleaved pipelines require.

    The result is computed from the lengths of all ranks, so that no collective can disagree inside
    the schedule. Without packing, a micro-batch has ``micro_batch_size`` samples of similar length;
    with packing, it has at most ``max_tokens`` tokens, as equal as possible. A rank with too few
    samples gets empty micro-batches.
    """
    splits = []
    for lengths in lengths_of_rank:
        if packing:
            splits.append(_pack(lengths, max_tokens))
        else:
            splits.append(_chunk(lengths, micro_batch_size))
    count = max(1, *(len(split) for split in splits))
    count = round_up(count, multiple_of)
    if packing:
        even = _spread(lengths_of_rank[rank], count, max_tokens)
        if even is not None:
            return even
    return _halve_until(splits[rank], count)


def round_up(number: int, multiple_of: int) -> int:
    """Return the smallest multiple of ``multiple_of`` that is at least ``number``."""
    return -(-number // multiple_of) * multiple_of


def _halve_until(split: list[list[int]], count: int) -> list[list[int]]:
    """Cut the micro-batches with the most samples in two until there are ``count``; add empty ones
    if none has two samples.
    """
    while len(split) < count:
        sizes = [len(members) for members in split]
        if max(sizes, default=0) < 2:
            split.append([])
            continue
        members = split.pop(sizes.index(max(sizes)))
        split += [members[0::2], members[1::2]]
    return split


def _chunk(lengths: Sequence[int], size: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _pack(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Pack by first fit decreasing. A sample longer than ``max_tokens`` gets a micro-batch of its
    own.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, free in enumerate(room):
            if lengths[index] <= free:
                bins[b].append(index)
                room[b] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return bins


def _spread(lengths: Sequence[int], count: int, max_tokens: int) -> list[list[int]] | None:
    """Return ``count`` packs of nearly equal size, longest sample first into the emptiest; None if
    one would be too large.

    First fit leaves a nearly empty last pack, which costs most where all packs must have one shape.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, b) for b in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, b = heapq.heappop(heap)
        bins[b].append(index)
        heapq.heappush(heap, (total + lengths[index], b))
    fits = all(total <= max_tokens or len(bins[b]) < 2 for total, b in heap)
    return bins if fits else None


def collate(
    samples: Sequence[TrainingSample],
    splits: Sequence[Sequence[int]],
    *,
    packing: bool,
    multiple_of: int = 1,
    uniform: bool = False,
    for_loss: bool = True,
    context_parallel: tuple[int, int] = (0, 1),
) -> Iterator[MicroBatch]:
    """Build the micro-batches of ``splits``, one at a time.

    Rows are a multiple of ``multiple_of`` tokens long (the TP size under sequence parallelism), and
    padded rows of the device's ``width_multiple``.
    ``context_parallel`` is this rank and the size of its group; with more than one rank every
    sequence is a multiple of 2 x size long, and the micro-batch holds this rank's tokens.
    ``uniform`` gives all micro-batches one shape, because Megatron's interleaved schedule mixes up
    shapes that differ. With ``for_loss`` they have the columns that the loss reads. A micro-batch
    without samples has one token, which the loss ignores.
    """
    batches = [tuple(samples[index] for index in split) for split in splits]
    cp_size = context_parallel[1]
    chunks = 1
    if cp_size > 1:
        chunks = 2 * cp_size
    multiple_of = math.lcm(chunks, cp_size * multiple_of)
    if packing:
        sizes = [_packed_size(batch, chunks) for batch in batches]
    else:
        multiple_of = math.lcm(multiple_of, capabilities().width_multiple)
        sizes = [_padded_size(batch) for batch in batches]
    if uniform:
        most_rows = max(rows for rows, _ in sizes)
        most_tokens = max(width for _, width in sizes)
        sizes = [(most_rows, most_tokens)] * len(batches)
    for batch, (rows, width) in zip(batches, sizes, strict=True):
        width = round_up(width, multiple_of)
        if packing:
            micro_batch = _packed(batch, width, chunks, context_parallel)
        else:
            micro_batch = _padded(batch, rows, width, context_parallel)
        if for_loss:
            micro_batch = dataclasses.replace(micro_batch, columns=_columns(batch))
        yield micro_batch


def _columns(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """Return the per-token arrays that all samples of a micro-batch have, in the order of its
    rows.
    """
    columns = {}
    for name, dtype in PER_TOKEN.items():
        if name == "engine_logprobs":
            rows = [sample.response.logprobs for sample in samples]
        else:
            rows = [getattr(sample, name) for sample in samples]
        if not any(row is None for row in rows):
            columns[name] = to_device(np.concatenate([np.zeros(0), *rows]), dtype)
    return columns


def _padded_size(samples: Sequence[TrainingSample]) -> tuple[int, int]:
    lengths = [length for sample in samples for length in sample.sequence_lengths]
    return max(1, len(lengths)), max(lengths, default=1)


def _packed_size(samples: Sequence[TrainingSample], chunks: int) -> tuple[int, int]:
    lengths = [length for sample in samples for length in sample.sequence_lengths]
    return 1, max(chunks, sum(round_up(length, chunks) for length in lengths))


def _padded(
    samples: Sequence[TrainingSample], rows: int, width: int, context_parallel: tuple[int, int]
) -> MicroBatch:
    """Return a micro-batch [rows, width], one sequence a row."""
    tokens = np.zeros((rows, width), np.int64)
    sequences = _sequences_of(samples)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence.input_ids)] = sequence.input_ids
    offsets = [row * width for row in range(len(sequences))]
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    return _micro_batch(
        samples=samples,
        tokens=tokens,
        positions=positions,
        offsets=offsets,
        packed=None,
        context_parallel=context_parallel,
    )


def _packed(
    samples: Sequence[TrainingSample], total: int, chunks: int, context_parallel: tuple[int, int]
) -> MicroBatch:
    """Return a micro-batch [1, total], one sequence after another, each padded to a multiple of
    ``chunks``.
    """
    tokens = np.zeros((1, total), np.int64)
    positions = np.zeros((1, total), np.int64)
    offsets = []
    end = 0
    for sequence in _sequences_of(samples):
        ids = sequence.input_ids
        start = end
        end += round_up(len(ids), chunks)
        tokens[0, start : start + len(ids)] = ids
        positions[0, start:end] = np.arange(end - start)
        offsets.append(start)
    bounds = [*offsets, end]
    if total > end:
        bounds.append(total)  # the padding is another sequence, to which nothing attends
    cu_seqlens = to_device(bounds, torch.int32)
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    params = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        bounds=tuple(bounds),
    )
    return _micro_batch(
        samples=samples,
        tokens=tokens,
        positions=positions,
        offsets=offsets,
        packed=params,
        context_parallel=context_parallel,
    )


def _sequences_of(samples: Sequence[TrainingSample]) -> list[TokenSequence]:
    """Return the sequences of all samples: a response in several segments has as many."""
    return [sequence for sample in samples for sequence in sample.sequences]


def _micro_batch(
    samples: Sequence[TrainingSample],
    tokens: np.ndarray,
    positions: np.ndarray,
    offsets: Sequence[int],
    packed: PackedSequences | None,
    context_parallel: tuple[int, int],
) -> MicroBatch:
    """Return the micro-batch of ``samples`` whose sequences begin at the ``offsets`` of the
    flattened tokens; under context parallelism with the tokens of one rank.
    """
    pieces = [np.zeros(0, np.int64)]
    for sequence, offset in zip(_sequences_of(samples), offsets, strict=True):
        pieces.append(offset + sequence.places)
    rows = np.concatenate(pieces)
    targets = [np.zeros(0, np.int64)]
    for sample in samples:
        targets.append(sample.response_ids)
    lengths = np.array([len(sample.response_ids) for sample in samples], np.int64)
    sequence_ids = np.repeat(np.arange(len(samples)), lengths)
    experts = collate_experts(samples, offsets, tokens.shape)
    here = None
    rank, size = context_parallel
    if size > 1:
        count, width = tokens.shape
        bounds = packed.bounds if packed else range(0, (count + 1) * width, width)
        order = positions_of(list(itertools.pairwise(bounds)), rank, size)
        rows = places_of_rank(rows, order, tokens.size)
        here = np.flatnonzero(rows >= 0)
        tokens = tokens_of_rank(tokens, order)
        positions = tokens_of_rank(positions, order)
        if experts is not None:
            experts = tokens_of_rank(experts, order)
    return MicroBatch(
        tokens=to_device(tokens),
        position_ids=to_device(positions),
        packed_seq_params=packed,
        rows=to_device(rows),
        targets=to_device(np.concatenate(targets)),
        sequence_ids=to_device(sequence_ids),
        samples=tuple(samples),
        R=to_device([sample.R for sample in samples], torch.float32),
        columns={},
        here=None if here is None else to_device(here),
        experts=None if experts is None else to_device(experts),
    )
