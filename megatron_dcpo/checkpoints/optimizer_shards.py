"""The distributed optimizer's state, saved and loaded by the ranks that hold it.

Megatron's ``fully_reshardable`` format gathers the state of all data-parallel ranks on each of
them; its ``dp_reshardable`` format gathers nothing, but ties a checkpoint to its tensor and
pipeline sizes. Here a rank's flat range of a parameter is cut into boxes of that parameter (the end
of a row, whole rows, the beginning of a row), and each box is a shard of the same tensor that
``fully_reshardable`` writes. So no rank holds the state of another, a rank reads what it owns, and
a checkpoint can be resumed at any layout; checkpoints that Megatron wrote are read as well. Experts
on several ranks have a second optimizer in the chain; their tensors are saved with the others, and
they share the options of the first one's groups.
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
from megatron.core.optimizer.optimizer import MegatronOptimizer, param_group_identifier_keys

_EXPERTS = "is_expert_parallel"
# the form of the checkpoint, by Megatron's name
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, shape


def is_distributed(optimizer: MegatronOptimizer | None) -> bool:
    return any(isinstance(part, DistributedOptimizer) for part in optimizer_parts(optimizer))


def optimizer_state(
    optimizer: MegatronOptimizer | None, model: dict[str, Any], is_loading: bool
) -> dict[str, Any]:
    """Return the sharded state of ``optimizer``, given the sharded state of the ``model``. Loading
    fills the tensors in place.
    """
    if optimizer is None:
        return {}
    if not is_distributed(optimizer):
        return dict(optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=METADATA))
    parts = optimizer_parts(optimizer)
    state = dict(parts[0].state_dict())
    if is_loading:
        for part in parts:
            part.load_state_dict(part.state_dict())  # allocates the moments
    shards: list[dict[str, list[ShardedTensor]]] = []
    for part in parts:
        shards.extend(_shards_of(part, model))
    state["param_state"] = dict(enumerate(shards))
    state["param_state_sharding_type"] = METADATA["distrib_optim_sharding_type"]
    return state


def restore(optimizer: MegatronOptimizer | None, loaded: dict[str, Any]) -> None:
    """Set step counts and options of the groups, and without the distributed optimizer also the
    tensors.
    """
    if optimizer is None:
        return
    if not is_distributed(optimizer):
        optimizer.load_state_dict(loaded)
        return
    loaded = {name: value for name, value in loaded.items() if not name.startswith("param_state")}
    saved = loaded["optimizer"]["param_groups"]
    for part in optimizer_parts(optimizer):
        present = part.state_dict()["optimizer"]["param_groups"]
        keys = _identifying(*saved, *present)
        saved_by_key = {tuple(group[key] for key in keys): group for group in saved}
        groups = []
        for group in present:
            same = saved_by_key[tuple(group[key] for key in keys)]
            groups.append({**same, _EXPERTS: group[_EXPERTS]})
        part.load_state_dict(
            {**loaded, "optimizer": {**loaded["optimizer"], "param_groups": groups}}
        )


def _identifying(*groups: dict[str, Any]) -> list[str]:
    """Return the options that identify a group, also at other sizes (an expert's parameter is in a
    group like any other's) and in another release of Megatron, which has more options.
    """
    keys = [key for key in param_group_identifier_keys if key != _EXPERTS]
    return [key for key in keys if all(key in group for group in groups)]


def _shards_of(
    part: DistributedOptimizer, model: dict[str, Any]
) -> Iterator[dict[str, list[ShardedTensor]]]:
    """Yield the shards of each parameter whose state this rank has, by the name of the state."""
    sharded, _ = extract_sharded_tensors_and_factories(model)
    bases = {id(base.data): base for base in nested_values(sharded)}
    for parameter, start, stop in _owned_ranges(part):
        shards = {}
        for name, tensor in main_param_and_states(part, parameter).items():
            if name == "step":  # kept for each group
                continue
            shards[name] = list(
                _shards(
                    base=bases[id(parameter)],
                    name=name,
                    values=tensor.detach(),
                    start=start,
                    stop=stop,
                )
            )
        yield shards


def _owned_ranges(part: DistributedOptimizer) -> Iterator[tuple[Tensor, int, int]]:
    """Yield the flat ranges whose state this rank has: parameter of the model, start and stop."""
    for buffer in part.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _shards(
    base: ShardedTensor | ShardedTensorFactory, name: str, values: Tensor, start: int, stop: int
) -> Iterator[ShardedTensor]:
    """Yield the sharded tensors of ``values``, the flat range [``start``, ``stop``) of the
    parameter that ``base`` describes. A factory cuts the parameter in two.
    """
    pieces = [base]
    if isinstance(base, ShardedTensorFactory):
        pieces = base.build()
    for piece in pieces:
        # the flat range of the piece in the parameter, and its intersection with the values
        first = piece.data.storage_offset() - base.data.storage_offset()
        low = max(start, first)
        high = min(stop, first + piece.data.numel())
        position = low - start
        # Prepended axes are written out, because Megatron's uneven shards do not know them.
        ones = (1,) * piece.prepend_axis_num
        for offset, shape in boxes(piece.local_shape, low - first, high - first):
            size = math.prod(shape)
            in_piece = (*(0 for _ in ones), *offset)
            global_offset = [sum(both) for both in zip(in_piece, piece.global_offset, strict=True)]
            yield ShardedTensor(
                key=f"optimizer.state.{name}.{piece.key}",
                data=values[position : position + size].view(*ones, *shape),
                dtype=values.dtype,
                local_shape=(*ones, *shape),
                global_shape=piece.global_shape,
                global_offset=tuple(global_offset),
                axis_fragmentations=None,
                replica_id=(*piece.replica_id[:2], 0),  # only one data-parallel rank has it
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )
            position += size


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return the flat range [``start``, ``stop``) of a tensor of ``shape`` as boxes in order; none
    if it is empty.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first_whole = -(-start // row)
    after_whole = stop // row

    def within(index: int, low: int, high: int) -> list[Box]:
        inside = []
        for offset, size in boxes(shape[1:], low - index * row, high - index * row):
            inside.append(((index, *offset), (1, *size)))
        return inside

    if first_whole > after_whole:
        return within(after_whole, start, stop)
    result = within(first_whole - 1, start, first_whole * row)
    if first_whole < after_whole:
        offset = (first_whole, *(0 for _ in shape[1:]))
        result.append((offset, (after_whole - first_whole, *shape[1:])))
    return result + within(after_whole, after_whole * row, stop)
