"""The values of a rehearsal's tensors, which have shape, type and device but hold nothing.

Real are numbers that follow from what the host has: token ids, positions, rows, bounds of
sequences, blocks, advantages, counts. They are computed on the host beside the tensors that stand
for them, so that code which reads them, or whose shapes depend on them, goes its usual way.

Invented are

* every other number that the host reads: it is 1;
* the indices of ``topk``, which experts are chosen by: they are balanced, so that every expert has
  as many tokens as every other, as far as their number allows;
* what other ranks have: it is what this rank has, and a sum over ranks is what this rank adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
c10d = torch.ops.c10d

MOST_NUMBERS = 1 << 22  # of a tensor whose values are kept
_INVENTED = 1
# operations whose result has a length that depends on values
_LENGTH_FROM_VALUES = (
    aten.nonzero.default,
    aten.masked_select.default,
    aten.index.Tensor,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.bincount.default,
)
# operations that read rows by their numbers
_INDEXED = (aten.index_select.default, aten.embedding.default)


class RehearsedValues(TorchDispatchMode):
    """Keeps the values of numbers that follow from the host's with the tensors that stand for
    them.
    """

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - torch's operations have no type
        types: object,
        args: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> object:
        keywords = dict(keywords or {})
        if function is _DEVICE:
            return device_of(args[0])
        if function in _INDEXED:
            _check_indices(function, args)
        if function is aten._local_scalar_dense.default:
            return _scalar(args[0])
        real = _real_result(function, args, keywords)
        if function in _LENGTH_FROM_VALUES:
            result: Any = _of_real_length(function, args, keywords, real)
        else:
            result = function(*args, **keywords)
        if function.namespace == "c10d":
            _of_other_ranks(function, args)
        elif function is aten.topk.default:
            _set_value(result[1], _balanced(result[1].shape, args[0].shape[_dim(args)]))
        else:
            _keep(result, real, function, args)
        return result


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of ``tensor`` without an operation, which torch makes of the question."""
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device


def value_of(tensor: Tensor) -> Tensor | None:
    """Return the real values of ``tensor``, on the host; None if it has none."""
    if isinstance(tensor, FakeTensor):
        value: Tensor | None = getattr(tensor, "rehearsed_value", None)
        return value
    return tensor if tensor.device.type == "cpu" else None


def read(tensor: Tensor) -> Tensor:
    """Return what the host reads from ``tensor``: its values, or invented ones."""
    value = value_of(tensor)
    if value is not None:
        return value
    with no_dispatch():
        return torch.full(tuple(tensor.shape), _INVENTED, dtype=tensor.dtype)


@contextmanager
def readable(told: Callable[[Tensor], None]) -> Iterator[None]:
    """Have tensors without values answer where the host reads them as lists or arrays, or copies
    or pickles what refers to them, and tell ``told`` of each one that it reads.
    """

    def tolist(tensor: Tensor) -> object:
        told(tensor)
        with no_dispatch():
            return torch.Tensor.tolist(read(tensor))

    def numpy(tensor: Tensor, **_: object) -> np.ndarray:
        values = read(tensor)
        with no_dispatch():
            return np.asarray(torch.Tensor.tolist(values), dtype=_NUMPY[tensor.dtype])

    def deepcopy(tensor: Tensor, _: object) -> Tensor:
        return tensor.clone()

    def reduce(tensor: Tensor, _: object) -> tuple[Callable[..., Tensor], tuple[object, ...]]:
        return torch.empty, (tuple(tensor.shape),)

    with (
        patch.object(FakeTensor, "tolist", tolist),
        patch.object(FakeTensor, "numpy", numpy),
        patch.object(FakeTensor, "__reduce_ex__", reduce),
        patch.object(Tensor, "__deepcopy__", deepcopy),
    ):
        yield


_NUMPY = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


def _scalar(tensor: Tensor) -> object:
    value = read(tensor)
    with no_dispatch():
        return value.item()


def _real_result(
    function: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    keywords: dict[str, Any],
) -> object:
    """Return what ``function`` gives for the values of its arguments; None where one of them has
    none, or where the function makes a tensor without saying what is in it.
    """
    if function.namespace != "aten" or torch.Tag.nondeterministic_seeded in function.tags:
        return None
    tensors = [leaf for leaf in tree_leaves((args, keywords)) if isinstance(leaf, Tensor)]
    if any(tensor.numel() > MOST_NUMBERS for tensor in tensors):
        return None
    if function in _FILLED_LIKE:
        args = (_placeholder(args[0]), *args[1:])
    elif not tensors:
        if not _is_filled(function, args, keywords):
            return None
    elif any(value_of(tensor) is None for tensor in tensors):
        return None

    def real(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return value_of(leaf)
        return leaf

    real_args, real_keywords = tree_map(real, (args, keywords))
    real_keywords.pop("pin_memory", None)
    if "device" in real_keywords:
        real_keywords["device"] = torch.device("cpu")
    with no_dispatch():
        return function(*real_args, **real_keywords)


_FILLED = (aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default)
_FILLED_LIKE = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
_FRACTIONS = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _is_filled(
    function: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> bool:
    """Return whether a function without tensors makes one of known numbers, and not too many."""
    if function in _FILLED:
        return math.prod(args[0] if isinstance(args[0], list | tuple) else ()) <= MOST_NUMBERS
    return function.name().startswith("aten::arange") or keywords.get("dtype") not in _FRACTIONS


def _placeholder(like: Tensor) -> Tensor:
    """Return a tensor of the host with shape and type of ``like``."""
    with no_dispatch():
        return torch.empty(tuple(like.shape), dtype=like.dtype)


def _keep(
    result: object,
    real: object,
    function: Any,  # noqa: ANN401
    args: tuple[Any, ...],
) -> None:
    """Note the real values of a result; forget those of a tensor that was written over with
    values that are not known.
    """
    if real is not None:
        results = tree_leaves(result)
        for tensor, value in zip(results, tree_leaves(real), strict=True):
            if isinstance(tensor, FakeTensor):
                _set_value(tensor, value)
        return
    if function._schema.is_mutable and args and isinstance(args[0], FakeTensor):
        _set_value(args[0], None)


def _set_value(tensor: Tensor, value: Tensor | None) -> None:
    tensor.rehearsed_value = value  # type: ignore[attr-defined]


def _of_real_length(
    function: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    real: object,
) -> object:
    """Return the result of an operation whose length depends on values."""
    like: Tensor = args[0]
    if real is not None:

        def stand_in(value: object) -> object:
            if not isinstance(value, Tensor):
                return value
            return like.new_empty(value.shape, dtype=value.dtype)

        return tree_map(stand_in, real)
    if function is aten.masked_select.default:
        mask = read(args[1])
        with no_dispatch():
            count = int(mask.expand(like.shape).sum())
        return like.new_empty(count)
    if function is aten.index.Tensor:
        return function(like, [_as_rows(index) for index in args[1]])
    return function(*args, **keywords)


def _as_rows(index: Tensor | None) -> Tensor | None:
    """Return a mask of one dimension as the numbers of its rows, any other index as it is."""
    if index is None or index.dtype != torch.bool or index.dim() != 1:
        return index
    mask = read(index)
    with no_dispatch():
        count = int(mask.sum())
    return index.new_empty(count, dtype=torch.int64)


def _check_indices(function: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401
    """Raise IndexError if an operation would read a row that is not there, which ends a process on
    a GPU long after it.
    """
    rows = args[0].shape[0] if function is aten.embedding.default else args[0].shape[args[1]]
    index = value_of(args[-1] if function is aten.index_select.default else args[1])
    if index is None or not index.numel():
        return
    with no_dispatch():
        least, most = (int(bound) for bound in index.aminmax())
    if least < 0 or most >= rows:
        raise IndexError(f"{function}: rows {least} to {most} of a tensor that has {rows}")


def _dim(args: tuple[Any, ...]) -> int:
    return args[2] if len(args) > 2 else -1


def _balanced(shape: torch.Size, choices: int) -> Tensor:
    """Return indices of ``shape`` [..., k] below ``choices``, each as often as the others."""
    with no_dispatch():
        return torch.arange(math.prod(shape)).remainder(choices).view(shape)


def _of_other_ranks(function: Any, args: tuple[Any, ...]) -> None:  # noqa: ANN401
    """Note the real values of what a collective leaves, if all ranks have what this one has."""
    with no_dispatch():
        if function is c10d._allgather_base_.default:
            _fill(args[0], args[1])
        elif function is c10d.allgather_.default:
            for outputs, tensor in zip(args[0], args[1], strict=True):
                for output in outputs:
                    _fill(output, tensor)
        elif function is c10d.alltoall_base_.default:
            _fill(args[0], args[1])


def _fill(output: Tensor, source: Tensor) -> None:
    """Write the values of ``source`` over those of ``output``, as often as there is room."""
    values = value_of(source)
    into = value_of(output)
    if into is None or not isinstance(output, FakeTensor):
        return
    if values is None or not values.numel() or output.numel() % values.numel():
        _set_value(output, None)
        return
    times = into.numel() // values.numel()
    into.view(times, -1).copy_(values.reshape(1, -1).expand(times, -1))
