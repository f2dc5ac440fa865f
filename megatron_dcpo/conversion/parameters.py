"""The parameters of a ``GPTModel`` in a checkpoint, whole and under any name Megatron gives them,
as Hugging Face slices.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_dcpo.conversion.megatron_checkpoint import MegatronCheckpoint, StoredTensor, as_bytes
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.peft_adapter import KEPT, SCALE, LowRank
from megatron_dcpo.weights.planner import Copy, interleavings, plan
from megatron_dcpo.weights.table import LOCAL_NAMES, hf_shapes

WHOLE_MODEL = Layout(
    make_vocab_size_divisible_by=1, transformer_engine=True
)  # one rank, Transformer Engine's names
_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = "decoder.layers."
_EXPERTS = re.compile(r"(mlp\.experts)(\.linear_fc[12]\.weight)(\d+)")
# Modules whose (empty) extra state Megatron expects in a checkpoint, in the local or the
# Transformer Engine spec.
_EXTRA_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj")
_EXTRA_STATES_QK = ("self_attention.q_layernorm", "self_attention.k_layernorm")


def row_copies(arch: Architecture) -> dict[str, list[Copy]]:
    """Map a Megatron parameter (global layer numbers, Transformer Engine's names) -> its copies in
    order of its rows.

    One rank holds all columns of what Megatron splits by columns, so every copy is one of rows.
    """
    copies: dict[str, list[Copy]] = {}
    for copy in plan(arch, WHOLE_MODEL, Coordinates()):
        if copy.dim == 1:
            rows, columns = hf_shapes(arch)[copy.hf]
            assert (copy.start, copy.length) == (0, columns)
            copy = replace(copy, start=0, hf_start=0, hf_stop=rows, dim=0)
        copies.setdefault(copy.megatron, []).append(copy)
    return {name: sorted(group, key=lambda copy: copy.start) for name, group in copies.items()}


def megatron_shape(arch: Architecture, copies: Sequence[Copy]) -> tuple[int, ...]:
    return (sum(copy.length for copy in copies), *hf_shapes(arch)[copies[0].hf][1:])


def checkpoint_key(megatron: str) -> tuple[str, tuple[int, ...]]:
    """Split ``decoder.layers.7.mlp...`` -> (``decoder.layers.mlp...``, (7,)): layers are stacked in
    a checkpoint, and the experts of a layer, (7, expert).
    """
    if not megatron.startswith(_LAYER):
        return megatron, ()
    number, _, rest = megatron.removeprefix(_LAYER).partition(".")
    expert = _EXPERTS.fullmatch(rest)
    if expert is None:
        return _LAYER + rest, (int(number),)
    return f"{_LAYER}{expert[1]}.experts{expert[2]}", (int(number), int(expert[3]))


def stack(arch: Architecture, place: Sequence[int]) -> tuple[int, ...]:
    """Return the leading axes of a checkpoint's tensor in which the parameter at ``place`` is one
    entry.
    """
    return (arch.num_layers, arch.num_experts)[: len(place)]


def extra_states(arch: Architecture) -> dict[str, None]:
    modules = _EXTRA_STATES + (_EXTRA_STATES_QK if arch.qk_layernorm else ())
    layers = arch.num_layers
    experts = arch.num_experts
    modules += (
        ("pre_mlp_layernorm",) if experts else ()
    )  # a module of its own; else fused to the first linear
    keys = [
        f"{_LAYER}{module}._extra_state/shard_{n}_{layers}"
        for n in range(layers)
        for module in modules
    ]
    for n, linear in itertools.product(range(layers), ("linear_fc1", "linear_fc2")):
        shards = [f"{n}.{expert}_{layers}.{experts}" for expert in range(experts)] or [
            f"{n}_{layers}"
        ]
        module = "mlp.experts.experts" if experts else "mlp"
        keys += [f"{_LAYER}{module}.{linear}._extra_state/shard_{shard}" for shard in shards]
    return dict.fromkeys([*keys, "decoder.final_layernorm._extra_state/shard_0_1"])


@dataclass(frozen=True)
class Slice:
    """Bytes of the Hugging Face tensor ``name`` from its byte ``start`` on: ``uint8``, contiguous,
    a view of a map.
    """

    name: str
    start: int
    values: Tensor


def slices(
    arch: Architecture, checkpoint: MegatronCheckpoint, located: Mapping[str, StoredTensor]
) -> Iterator[list[Slice]]:
    """Yield, for each Megatron parameter, its rows as slices of Hugging Face tensors, each tensor's
    in order; no padding. Merged with the low-rank adapter that a training with ``model.adapter``
    leaves in a checkpoint.

    ``located``: what :func:`locate` returned.
    """
    for megatron, copies in row_copies(arch).items():
        blocks = checkpoint.blocks(located[megatron])
        parts = []
        for copy in copies:
            for first, block in blocks:
                low = max(copy.start, first)
                high = min(copy.start + copy.length, first + len(block))
                if low < high:
                    row = copy.hf_start + low - copy.start
                    values = block[low - first : high - first]
                    start = row * block[0].numel()
                    if (pair := _low_rank(checkpoint, copy.hf)) is not None:
                        values = _added(
                            values,
                            torch_dtype(located[megatron].dtype),
                            pair.part(0, row, row + high - low),
                        )
                    parts.append(
                        Slice(
                            name=copy.hf,
                            start=start,
                            values=values,
                        )
                    )
        yield parts


def _low_rank(checkpoint: MegatronCheckpoint, name: str) -> LowRank | None:
    """Return what a checkpoint of a training with ``model.adapter`` adds to the Hugging Face tensor
    ``name``.
    """
    module = f"{KEPT}weight.{name.removesuffix('.weight')}"
    keys = f"{module}.lora_A.weight", f"{module}.lora_B.weight", SCALE
    if not all(key in checkpoint.tensors for key in keys):
        return None
    A, B, scale = (
        torch.cat([block for _, block in checkpoint.blocks(checkpoint.tensors[key])])
        .view(torch.float32)
        .squeeze(-1)
        for key in keys
    )
    return LowRank(
        A=A,
        B=B,
        scale=float(scale),
    )


def _added(values: Tensor, dtype: torch.dtype, addition: Tensor) -> Tensor:
    """Return ``values`` [rows, columns, bytes] of ``dtype`` plus ``addition`` [rows, columns] fp32,
    as bytes again.
    """
    total = addition.add_(values.clone().view(dtype).squeeze(-1))  # a map is not aligned
    return as_bytes(total.to(dtype)).view(values.shape)


def locate(arch: Architecture, checkpoint: MegatronCheckpoint) -> dict[str, StoredTensor]:
    """Return every Megatron parameter in the checkpoint.

    Raises :class:`UserError` when the checkpoint lacks a tensor, has one too many, or of another
    shape.
    """
    path = checkpoint.path
    prefix, model = _model_tensors(checkpoint)
    used: set[str] = set()
    located = {}
    kinds = interleavings(arch, WHOLE_MODEL, Coordinates())
    for megatron, copies in row_copies(arch).items():
        tensor = located[megatron] = _find(
            model=model,
            prefix=prefix,
            megatron=megatron,
            arch=arch,
            path=path,
            used=used,
        )
        shape = megatron_shape(arch, copies)
        padded = kinds[megatron] == "vocab" and tensor.shape[0] > shape[0]
        if tensor.shape != ((tensor.shape[0], *shape[1:]) if padded else shape):
            raise UserError(
                f"{path}: {megatron} has shape {list(tensor.shape)}, config.json implies "
                f"{list(shape)}"
            )
    for key in sorted(set(model) - used):
        raise UserError(f"{path}: config.json has no place for the checkpoint's tensor {key}")
    return located


def _find(
    model: Mapping[str, StoredTensor],
    prefix: str,
    megatron: str,
    arch: Architecture,
    path: Path,
    used: set[str],
) -> StoredTensor:
    """Return the tensor under any of the names Megatron gives it: layers and experts stacked or
    apart, norms fused or not.
    """
    key, place = checkpoint_key(megatron)
    for name in (key, _other_name(key)):
        apart = [prefix + name]
        if place:
            apart.append(f"{prefix}{_LAYER}{place[0]}.{name.removeprefix(_LAYER)}")
        if len(place) == 2:
            apart.append(apart[-1].replace(".experts.experts.", f".experts.experts.{place[1]}."))
        for number, found in enumerate(apart):
            parts = next(
                ([*p] for p in ((found,), (found + "_w", found + "_v")) if model.keys() >= {*p}), []
            )
            if not parts:
                continue
            used.update(parts)
            if len(parts) == 1:
                tensor = model[parts[0]]
            else:
                tensor = model[parts[0]].append(model[parts[1]])
            for entry, size, axis in [
                *zip(place, stack(arch, place), ("layers", "experts"), strict=False)
            ][number:]:
                if tensor.shape[0] != size:
                    raise UserError(
                        f"{path}: the checkpoint has {tensor.shape[0]} {axis}, config.json says "
                        f"{size}"
                    )
                tensor = tensor.entry(entry)
            return tensor
    raise UserError(f"{path}: tensor {prefix}{key} is missing; config.json promises it")


def _other_name(key: str) -> str:
    """Return the same in the other layer spec: the local one names the norm before experts as if it
    were fused.
    """
    for fused, local in LOCAL_NAMES.items():
        for name, other in ((fused, local), (local, fused)):
            if key.endswith(f".{name}"):
                return key.removesuffix(name) + other
    return key


def _model_tensors(checkpoint: MegatronCheckpoint) -> tuple[str, dict[str, StoredTensor]]:
    """Return (prefix, tensors) of the language model in a checkpoint that may hold an optimizer
    too.

    Wrappers put ``module.`` or ``model.`` before the names. Raises :class:`UserError` when there is
    no model.
    """
    prefixes = {
        key.removesuffix(_EMBEDDING) for key in checkpoint.tensors if key.endswith(_EMBEDDING)
    }
    prefixes = {prefix for prefix in prefixes if set(prefix.split(".")) <= {"", "model", "module"}}
    if len(prefixes) != 1:
        count = f"{len(prefixes)} models" if prefixes else "no GPT model"
        raise UserError(f"{checkpoint.path}: {count} in the checkpoint (looked for {_EMBEDDING})")
    prefix = prefixes.pop()
    parts = tuple(prefix + part for part in ("embedding.", "decoder.", "output_layer."))
    return prefix, {
        key: tensor for key, tensor in checkpoint.tensors.items() if key.startswith(parts)
    }
