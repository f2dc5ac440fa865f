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

from megatron_dcpo.policy.context_parallel import slice_for_rank
from megatron_dcpo.policy.routing_replay import collate_experts
from megatron_dcpo.runtime.device import to_device
from megatron_dcpo.types import MicroBatch, TrainingSample

from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip


PER_TOKEN = {  # what the loss reads of each response token, by name, and its type
    "advantages": torch.float32,
    "block_ids": torch.int64,
    "weights": torch.float32,
    "engine_logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
}


def sequence_length(sample: TrainingSample) -> int:
    """Return the number of tokens of prompt and response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


def assign_to_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal samples over data-parallel ranks, longest first, there and back: equal counts (+-1),
    near-equal tokens.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for position, index in enumerate(order):
        turn, place = divmod(position, ranks)
        shares[place if turn % 2 == 0 else ranks - 1 - place].append(index)
    return shares


def split_micro_batches(
    lengths_of_rank: Sequence[Sequence[int]],
    rank: int,
    *,
    micro_batch_size: int,
    max_tokens: int,
    packing: bool,
    multiple_of: int = 1,
) -> list[list[int]]:
    """Return micro-batches (lists of indices into this rank's samples); their number is the same on
    every rank.

    Computed from the lengths of all ranks, so that no collective can disagree inside the schedule.
    Without packing a micro-batch has ``micro_batch_size`` samples of similar length, with packing
    at most ``max_tokens`` tokens, as equal as possible. A rank with too few samples gets empty
    micro-batches. ``multiple_of``: what interleaved pipelines demand.
    """
    splits = [
        _pack(ls, max_tokens) if packing else _chunk(ls, micro_batch_size) for ls in lengths_of_rank
    ]
    count = -(-max(1, *(len(split) for split in splits)) // multiple_of) * multiple_of
    if packing:
        even = _spread(lengths_of_rank[rank], count, max_tokens)
    else:
        even = None
    if even is not None:
        return even
    split = splits[rank]
    while len(split) < count:
        if split:
            largest = max(range(len(split)), key=lambda i: len(split[i]))
        else:
            largest = 0
        if not split or len(split[largest]) < 2:
            split.append([])
            continue
        members = split.pop(largest)
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
    """Build the micro-batches one at a time. ``multiple_of``: row length multiple (TP size under
    sequence parallel). ``context_parallel``: rank and size; every sequence is then a multiple of 2
    x size long.

    ``uniform`` gives all of them one shape: Megatron's interleaved schedule mixes up shapes that
    differ. A micro-batch without samples has one token, of which nothing is asked. ``for_loss``:
    with the columns that the loss reads.
    """
    chosen = [tuple(samples[i] for i in split) for split in splits]
    cp = context_parallel[1]
    chunks = 2 * cp if cp > 1 else 1
    multiple_of = math.lcm(chunks, cp * multiple_of)
    sizes = [_packed_size(batch, chunks) if packing else _padded_size(batch) for batch in chosen]
    largest = tuple(max(column) for column in zip(*sizes, strict=True))
    for batch, size in zip(chosen, sizes, strict=True):
        rows, width = largest if uniform else size
        width = -(-width // multiple_of) * multiple_of
        offsets = _offsets(batch, None if packing else width, chunks)
        if packing:
            micro_batch = _packed(
                samples=batch,
                offsets=offsets,
                total=width,
                chunks=chunks,
            )
        else:
            micro_batch = _padded(
                samples=batch,
                offsets=offsets,
                rows=rows,
                width=width,
            )
        if cp > 1:
            micro_batch = slice_for_rank(micro_batch, context_parallel)
        yield dataclasses.replace(micro_batch, columns=_columns(batch)) if for_loss else micro_batch


def _columns(samples: Sequence[TrainingSample]) -> dict[str, Tensor]:
    """Return the per-token arrays of a micro-batch's samples, in the order of its rows; those that
    all samples have.
    """
    columns = {}
    for name, dtype in PER_TOKEN.items():
        rows = [
            s.response.logprobs if name == "engine_logprobs" else getattr(s, name) for s in samples
        ]
        if not any(row is None for row in rows):
            columns[name] = to_device(np.concatenate([np.zeros(0), *rows]), dtype)
    return columns


def _offsets(samples: Sequence[TrainingSample], width: int | None, chunks: int) -> list[int]:
    """Return where each sample begins: every ``width`` tokens, or with the padding between them
    that ``chunks`` ask for.
    """
    if width is not None:
        return [row * width for row in range(len(samples))]
    return [0, *itertools.accumulate(_padded_length(sample, chunks) for sample in samples)][:-1]


def _padded_length(sample: TrainingSample, chunks: int) -> int:
    return -(-sequence_length(sample) // chunks) * chunks


def _padded_size(samples: Sequence[TrainingSample]) -> tuple[int, int]:
    return max(1, len(samples)), max(map(sequence_length, samples), default=1)


def _packed_size(samples: Sequence[TrainingSample], chunks: int) -> tuple[int, int]:
    return 1, max(chunks, sum(_padded_length(sample, chunks) for sample in samples))


def _padded(
    samples: Sequence[TrainingSample], offsets: Sequence[int], rows: int, width: int
) -> MicroBatch:
    tokens = np.zeros((rows, width), np.int64)
    for row, sample in enumerate(samples):
        tokens[row, : sequence_length(sample)] = np.concatenate(
            [sample.prompt_ids, sample.response_ids]
        )
    positions = np.broadcast_to(np.arange(width), tokens.shape)
    return _micro_batch(
        samples=samples,
        tokens=tokens,
        positions=positions,
        offsets=offsets,
        packed=None,
    )


def _packed(
    samples: Sequence[TrainingSample], offsets: Sequence[int], total: int, chunks: int
) -> MicroBatch:
    if samples:
        bounds = [*offsets, offsets[-1] + _padded_length(samples[-1], chunks)]
    else:
        bounds = [0]
    tokens = np.zeros((1, total), np.int64)
    positions = np.zeros((1, total), np.int64)
    for sample, (start, stop) in zip(samples, itertools.pairwise(bounds), strict=True):
        tokens[0, start : start + sequence_length(sample)] = np.concatenate(
            [sample.prompt_ids, sample.response_ids]
        )
        positions[0, start:stop] = np.arange(stop - start)
    if total > bounds[-1]:
        bounds = [*bounds, total]  # the filling is a sequence of its own, which nothing attends to
    cu = to_device(bounds, torch.int32)
    longest = max(stop - start for start, stop in itertools.pairwise(bounds))
    params = PackedSeqParams("thd", cu, cu, None, None, longest, longest)
    return _micro_batch(
        samples=samples,
        tokens=tokens,
        positions=positions,
        offsets=offsets,
        packed=params,
    )


def _micro_batch(
    samples: Sequence[TrainingSample],
    tokens: np.ndarray,
    positions: np.ndarray,
    offsets: Sequence[int],
    packed: PackedSeqParams | None,
) -> MicroBatch:
    lengths = np.array([len(sample.response_ids) for sample in samples], np.int64)
    first = np.array(
        [offset + len(s.prompt_ids) - 1 for s, offset in zip(samples, offsets, strict=True)],
        np.int64,
    )
    rows = np.arange(lengths.sum()) + np.repeat(first + lengths - np.cumsum(lengths), lengths)
    owners = np.repeat(np.arange(len(samples)), lengths)
    targets = np.concatenate([np.zeros(0, np.int64), *(sample.response_ids for sample in samples)])
    experts = collate_experts(samples, offsets, tokens.shape)
    return MicroBatch(
        tokens=to_device(tokens),
        position_ids=to_device(positions),
        packed_seq_params=packed,
        rows=to_device(rows),
        targets=to_device(targets),
        sequence_ids=to_device(owners),
        samples=tuple(samples),
        R=to_device([sample.R for sample in samples], torch.float32),
        columns={},
        experts=None if experts is None else to_device(experts),
    )
