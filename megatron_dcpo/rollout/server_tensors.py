"""The tensors that go to a vLLM server over NCCL: put together from slices, told in calls, packed
into messages (:mod:`megatron_dcpo.weights.packed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_dcpo.rollout.engine import EngineError
from megatron_dcpo.weights.packed import CALL_BYTES, MESSAGE_BYTES, WORKER_STREAMS, groups
from megatron_dcpo.weights.planner import WeightSlice
from megatron_dcpo.weights.table import EMBEDDING, OUTPUT


def whole_tensors(
    buckets: Iterable[Sequence[WeightSlice]], shapes: Mapping[str, Sequence[int]], tied: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each tensor when its last slice has come; those that no slice
    completed are missing at the end: :class:`EngineError`. A tied output layer is sent as a tensor
    too: vLLM may keep a copy of it.
    """
    begun: dict[str, tuple[Tensor, int]] = {}
    left = set(shapes)
    for bucket in buckets:
        for piece in bucket:
            tensor, filled = begun.pop(piece.name, (None, 0))
            if tensor is None:
                tensor = torch.empty(
                    tuple(shapes[piece.name]), dtype=piece.values.dtype, device=piece.values.device
                )
            piece.write_into(tensor)
            filled += piece.values.numel()
            if filled < tensor.numel():
                begun[piece.name] = tensor, filled
                continue
            left.remove(piece.name)
            yield piece.name, tensor
            if tied and piece.name == EMBEDDING:
                yield OUTPUT, tensor
    if left:
        raise EngineError(f"{len(left)} tensors did not come completely, {min(left)} among them")


def in_calls(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each call, in their order, but those with larger element types first:
    each then begins at a multiple of its element's size in its message, as the workers' views of it
    need.
    """
    for call in groups(tensors, lambda named: named[1].nbytes, CALL_BYTES):
        call.sort(key=lambda named: -named[1].element_size())
        yield dict(call)
        call.clear()  # their memory is free before the next ones come


def packed(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the messages of a call, uint8 [bytes]. A message of one tensor is a view of it."""
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    return [
        parts[0] if len(parts) == 1 else torch.cat(parts)
        for parts in groups(flat, torch.numel, MESSAGE_BYTES)
    ]


def connection(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the server's workers are told of the group that rank 0 opens, and of the messages
    in which tensors will come.
    """
    return {
        **group,
        "rank_offset": 1,
        "packed": True,
        "packed_buffer_size_bytes": MESSAGE_BYTES,
        "packed_num_buffers": WORKER_STREAMS,
    }


def described(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return what the server is told of the tensors of a call, in their order."""
    return {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
