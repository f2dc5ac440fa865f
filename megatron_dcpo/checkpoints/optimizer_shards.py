"""A rank's own part of the distributed optimizer's state, saved and loaded where it is.

Megatron's ``fully_reshardable`` format gathers the state of all data-parallel ranks on each of
them; its ``dp_reshardable`` format gathers nothing, but ties a checkpoint to its tensor and
pipeline sizes. Here a rank's flat range of a parameter is cut into boxes of that parameter (the end
of a row, whole rows, the beginning of a row), and each box is a shard of the same tensor that
``fully_reshardable`` writes. So no rank holds another's state, a rank reads what it owns, and a
checkpoint resumes at any layout; those that Megatron's own code wrote are read as well. Experts on
several ranks have an optimizer of their own behind the first; their tensors stand beside the
others', and they share its groups' options.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from megatron_dcpo.policy.optimizer import optimizer_parts
from megatron_dcpo.runtime.megatron_private import main_param_and_states

from megatron.core.dist_checkpointing import ShardedTensor  # isort: skip
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys

_EXPERTS = "is_expert_parallel"
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable"
}  # what is in the checkpoint, as Megatron names it

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


def is_distributed(optimizer: Any) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in optimizer_parts(optimizer))


def optimizer_state(optimizer: Any, model: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    """Return the sharded state of ``optimizer``; ``model``: the sharded state of the model. Loading
    fills the tensors in place.
    """
    if optimizer is None:
        return {}
    if not is_distributed(optimizer):
        return dict(optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA))
    parts = optimizer_parts(optimizer)
    state = dict(parts[0].state_dict())
    for part in parts if is_loading else ():
        part.load_state_dict(part.state_dict())  # allocates the moments
    state["param_state"] = dict(
        enumerate(shards for part in parts for shards in _own_shards(part, model))
    )
    state["param_state_sharding_type"] = METADATA["distrib_optim_sharding_type"]
    return state


def restore(optimizer: Any, loaded: dict[str, Any]) -> None:
    """Set step counts and options of the groups, and without the distributed optimizer the tensors
    too.
    """
    if optimizer is None:
        return
    if not is_distributed(optimizer):
        optimizer.load_state_dict(loaded)
        return
    loaded = {name: value for name, value in loaded.items() if not name.startswith("param_state")}
    saved = loaded["optimizer"]["param_groups"]
    for part in optimizer_parts(optimizer):
        own = part.state_dict()["optimizer"]["param_groups"]
        keys = _identifying(*saved, *own)
        found = {tuple(group[key] for key in keys): group for group in saved}
        groups = [
            found[tuple(group[key] for key in keys)] | {_EXPERTS: group[_EXPERTS]} for group in own
        ]
        part.load_state_dict(loaded | {"optimizer": loaded["optimizer"] | {"param_groups": groups}})


def _identifying(*groups: dict[str, Any]) -> list[str]:
    """Return by which options a group is found again, at other sizes as well (an expert's parameter
    is in a group like any other's), and by another release of Megatron, which has more of them.
    """
    keys = [key for key in param_group_identifier_keys if key != _EXPERTS]
    return [key for key in keys if all(key in group for group in groups)]


def _own_shards(
    part: DistributedOptimizer, model: dict[str, Any]
) -> Iterator[dict[str, list[ShardedTensor]]]:
    sharded, _ = extract_sharded_tensors_and_factories(model)
    bases = {id(base.data): base for base in nested_values(sharded)}
    for parameter, start, stop in _owned_ranges(part):
        tensors = main_param_and_states(part, parameter)
        yield {
            name: list(
                _shards(
                    base=bases[id(parameter)],
                    name=name,
                    own=tensor.detach(),
                    start=start,
                    stop=stop,
                )
            )
            for name, tensor in tensors.items()
            if name != "step"  # kept per group
        }


def _owned_ranges(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int, int]]:
    """Yield (parameter of the model, start, stop) of the flat ranges whose state this rank has."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _shards(
    base: ShardedTensor | ShardedTensorFactory, name: str, own: Tensor, start: int, stop: int
) -> Iterator[ShardedTensor]:
    """Return the sharded tensors of ``own``: the flat values [``start``, ``stop``) of the parameter
    that ``base`` describes. A factory cuts it in two.
    """
    if isinstance(base, ShardedTensorFactory):
        pieces = base.build()
    else:
        pieces = [base]
    for piece in pieces:
        first = (
            piece.data.storage_offset() - base.data.storage_offset()
        )  # of the piece in the flat parameter
        a = max(start, first)
        b = min(stop, first + piece.data.numel())
        at = a - start
        for offset, shape in boxes(piece.local_shape, a - first, b - first):
            ones = (
                (1,) * piece.prepend_axis_num
            )  # written out: Megatron's uneven shards know no prepended axes
            inside = ((0,) * len(ones) + offset, piece.global_offset)
            size = math.prod(shape)
            yield ShardedTensor(
                key=f"optimizer.state.{name}.{piece.key}",
                data=own[at : at + size].view(*ones, *shape),
                dtype=own.dtype,
                local_shape=(*ones, *shape),
                global_shape=piece.global_shape,
                global_offset=tuple(map(sum, zip(*inside, strict=True))),
                axis_fragmentations=None,
                replica_id=(*piece.replica_id[:2], 0),  # one data-parallel rank has it
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
            at += size


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the flat range [``start``, ``stop``) of a tensor of ``shape`` as boxes, in order; none
    if it is empty.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows

    def within(index: int, a: int, b: int) -> list[Box]:
        return [
            ((index, *offset), (1, *size))
            for offset, size in boxes(shape[1:], a - index * row, b - index * row)
        ]

    if first > last:
        return within(last, start, stop)
    if first < last:
        whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))]
    else:
        whole = []
    return within(first - 1, start, first * row) + whole + within(last, last * row, stop)
