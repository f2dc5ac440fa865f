"""The parameters of a ``GPTModel`` in a checkpoint, whole and under any name that Megatron gives
them, as slices of Hugging Face tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_dcpo.architectures.config_json import Architecture
from megatron_dcpo.conversion.megatron_checkpoint import MegatronCheckpoint, StoredTensor, as_bytes
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.weights.layout import Coordinates, Layout
from megatron_dcpo.weights.peft_adapter import KEPT, SCALE, LowRank, scale_key
from megatron_dcpo.weights.planner import Copy, interleavings, plan
from megatron_dcpo.weights.table import (
    LOCAL_NAMES,
    OUTPUT_NORMS,
    Interleaving,
    hf_shapes,
)

# one rank, Transformer Engine's names
WHOLE_MODEL = Layout(make_vocab_size_divisible_by=1, transformer_engine=True)
_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = "decoder.layers."
_EXPERTS = re.compile(r"(mlp\.experts)(\.linear_fc[12]\.weight)(\d+)")
# Modules whose (empty) extra state Megatron expects in a checkpoint, in the local or the
# Transformer Engine spec.
_EXTRA_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj")
_EXTRA_STATES_QK = ("self_attention.q_layernorm", "self_attention.k_layernorm")
_LINEARS = ("linear_fc1", "linear_fc2")


@functools.lru_cache(maxsize=4)  # for import, and for each step of an export
def row_copies(arch: Architecture) -> Mapping[str, Sequence[Copy]]:
    """Return the copies of each Megatron parameter (global layer numbers, Transformer Engine's
    names) in order of its rows.

    One rank holds all columns of the tensors that Megatron splits by columns, so every copy is a
    copy of rows.
    """
    copies: dict[str, list[Copy]] = {}
    for copy in plan(arch, WHOLE_MODEL, Coordinates()):
        if copy.dim == 1:
            rows, columns = hf_shapes(arch)[copy.hf]
            assert (copy.start, copy.length) == (0, columns)
            copy = replace(copy, start=0, hf_start=0, hf_stop=rows, dim=0)
        copies.setdefault(copy.megatron, []).append(copy)
    in_order = {
        name: tuple(sorted(group, key=lambda copy: copy.start)) for name, group in copies.items()
    }
    return MappingProxyType(in_order)


def kinds_of_tensors(arch: Architecture) -> dict[str, Interleaving]:
    """Return how the Hugging Face tensors of each entry of :func:`row_copies` interleave."""
    return dict(interleavings(arch, WHOLE_MODEL, Coordinates()))


def megatron_shape(arch: Architecture, copies: Sequence[Copy]) -> tuple[int, ...]:
    return (sum(copy.length for copy in copies), *hf_shapes(arch)[copies[0].hf][1:])


def has_stacked_layers(arch: Architecture) -> bool:
    """Return whether Megatron writes a parameter of all layers as one tensor. It does not if some
    layers have experts and others have none.
    """
    return not arch.dense_layers


@dataclass(frozen=True)
class Place:
    """Where a parameter is in a checkpoint: entry ``index`` along the leading axes of tensor
    ``key``, which have the sizes ``stack``.
    """

    key: str
    index: tuple[int, ...]
    stack: tuple[int, ...]


def place_of(arch: Architecture, megatron: str) -> Place:
    """Return the place that Megatron gives a parameter in a checkpoint that it writes."""
    key, index = stacked_key(megatron)
    sizes = stack(arch, index)
    if index and not has_stacked_layers(arch):
        _, key, *_ = _candidates(key, "", index)
        index = index[1:]
        sizes = sizes[1:]
    return Place(key=key, index=index, stack=sizes)


def stacked_key(megatron: str) -> tuple[str, tuple[int, ...]]:
    """Split ``decoder.layers.7.mlp...`` into the key ``decoder.layers.mlp...`` and the index (7,),
    for a checkpoint that stacks layers. The index of an expert's parameter is (7, expert).
    """
    if not megatron.startswith(_LAYER):
        return megatron, ()
    number, _, rest = megatron.removeprefix(_LAYER).partition(".")
    for norm, in_checkpoint in OUTPUT_NORMS.items():
        rest = rest.replace(norm, in_checkpoint)
    expert = _EXPERTS.fullmatch(rest)
    if expert is None:
        return _LAYER + rest, (int(number),)
    return f"{_LAYER}{expert[1]}.experts{expert[2]}", (int(number), int(expert[3]))


def stack(arch: Architecture, index: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of the leading axes of the checkpoint's tensor in which a parameter with
    this ``index`` is one entry.
    """
    return (arch.num_layers, arch.num_experts)[: len(index)]


def extra_states(arch: Architecture) -> dict[str, None]:
    """Return the keys of the empty extra states that Megatron expects in a checkpoint."""
    keys = []
    for layer in range(arch.num_layers):
        modules = _modules_with_extra_state(arch, layer)
        keys += [_extra_state(arch, layer, module) for module in modules]
    for layer in range(arch.num_layers):
        mlp = "mlp"
        if arch.has_experts(layer):
            mlp = "mlp.shared_experts"
            keys += _extra_states_of_experts(arch, layer)
        if not arch.has_experts(layer) or arch.shared_ffn_hidden_size:
            keys += [_extra_state(arch, layer, f"{mlp}.{linear}") for linear in _LINEARS]
    keys.append("decoder.final_layernorm._extra_state/shard_0_1")
    return dict.fromkeys(keys)


def _modules_with_extra_state(arch: Architecture, layer: int) -> list[str]:
    """Return the modules of a layer that have one, but for the linear layers of the MLP."""
    modules = list(_EXTRA_STATES)
    if arch.qk_layernorm:
        modules += _EXTRA_STATES_QK
    if arch.norms.attention_output is not None:
        modules.append("self_attention.linear_proj.post_layernorm")
    if arch.norms.mlp_output is not None:
        modules.append("mlp.linear_fc2.post_layernorm")
    if arch.has_experts(layer):
        # a separate module; otherwise it is fused into the first linear layer
        modules.append("pre_mlp_layernorm")
    return modules


def _extra_states_of_experts(arch: Architecture, layer: int) -> list[str]:
    keys = []
    for linear in _LINEARS:
        for expert in range(arch.num_experts):
            module = f"mlp.experts.experts.{linear}"
            keys.append(_extra_state(arch, layer, module, (expert, arch.num_experts)))
    return keys


def _extra_state(arch: Architecture, layer: int, module: str, *inner: tuple[int, int]) -> str:
    """Return the key of a module's extra state: its position on the leading axes, ``inner`` ones
    behind the layers', and their sizes.
    """
    if has_stacked_layers(arch):
        prefix = _LAYER
        axes = [(layer, arch.num_layers), *inner]
    else:
        prefix = f"{_LAYER}{layer}."
        axes = list(inner) or [(0, 1)]
    position = ".".join(str(entry) for entry, _ in axes)
    sizes = ".".join(str(size) for _, size in axes)
    return f"{prefix}{module}._extra_state/shard_{position}_{sizes}"


@dataclass(frozen=True)
class Slice:
    """Bytes of the Hugging Face tensor ``name``, beginning at its byte ``start``: ``uint8``,
    contiguous, a view of a mapped file.
    """

    name: str
    start: int
    values: Tensor


def slices(
    arch: Architecture, checkpoint: MegatronCheckpoint, located: Mapping[str, StoredTensor]
) -> Iterator[list[Slice]]:
    """Yield the rows of each Megatron parameter, without padding, as slices of Hugging Face
    tensors, those of one tensor in order. A low-rank adapter that a training with ``model.adapter``
    left in the checkpoint is merged.

    ``located`` is the result of :func:`locate`.
    """
    for megatron, copies in row_copies(arch).items():
        dtype = torch_dtype(located[megatron].dtype)
        blocks = checkpoint.blocks(located[megatron])
        parts = []
        for copy in copies:
            for first, block in blocks:
                low = max(copy.start, first)
                high = min(copy.start + copy.length, first + len(block))
                if low >= high:
                    continue
                row = copy.hf_start + low - copy.start
                values = block[low - first : high - first]
                low_rank = _low_rank(checkpoint, copy.hf)
                if low_rank is not None:
                    values = _added(values, dtype, low_rank.part(0, row, row + high - low))
                parts.append(Slice(name=copy.hf, start=row * block[0].numel(), values=values))
        # queries and their gates change places
        yield sorted(parts, key=lambda part: part.start)


def _low_rank(checkpoint: MegatronCheckpoint, name: str) -> LowRank | None:
    """Return the adapter's addition to the Hugging Face tensor ``name``, if the checkpoint is of a
    training with ``model.adapter``.
    """
    module = f"{KEPT}weight.{name.removesuffix('.weight')}"
    key_A = f"{module}.lora_A.weight"
    key_B = f"{module}.lora_B.weight"
    if not checkpoint.tensors.keys() >= {key_A, key_B}:
        return None
    module_key = scale_key(name.removesuffix(".weight"))
    key = module_key if module_key in checkpoint.tensors else SCALE
    return LowRank(
        A=_float32(checkpoint, key_A),
        B=_float32(checkpoint, key_B),
        scale=float(_float32(checkpoint, key)),
    )


def _float32(checkpoint: MegatronCheckpoint, key: str) -> Tensor:
    blocks = [block for _, block in checkpoint.blocks(checkpoint.tensors[key])]
    return torch.cat(blocks).view(torch.float32).squeeze(-1)


def _added(values: Tensor, dtype: torch.dtype, addition: Tensor) -> Tensor:
    """Return ``values`` [rows, columns, bytes] of ``dtype`` plus ``addition`` [rows, columns] fp32,
    as bytes again.
    """
    total = addition.add_(values.clone().view(dtype).squeeze(-1))  # a map is not aligned
    return as_bytes(total.to(dtype)).view(values.shape)


def locate(arch: Architecture, checkpoint: MegatronCheckpoint) -> dict[str, StoredTensor]:
    """Return every Megatron parameter in the checkpoint.

    Raises :class:`UserError` if the checkpoint lacks a tensor, has one too many, or has one of
    another shape.
    """
    path = checkpoint.path
    prefix, model = _model_tensors(checkpoint)
    used: set[str] = set()
    located = {}
    kinds = kinds_of_tensors(arch)
    for megatron, copies in row_copies(arch).items():
        keys, tensor = _find(model=model, prefix=prefix, megatron=megatron, arch=arch, path=path)
        used.update(keys)
        located[megatron] = tensor
        shape = megatron_shape(arch, copies)
        expected = shape
        if kinds[megatron] == "vocab" and tensor.shape[0] > shape[0]:
            expected = (tensor.shape[0], *shape[1:])  # with padding
        if tensor.shape != expected:
            raise UserError(
                f"{path}: {megatron} has shape {list(tensor.shape)}, config.json implies "
                f"{list(shape)}"
            )
    for key in sorted(set(model) - used):
        raise UserError(f"{path}: config.json has no place for the checkpoint's tensor {key}")
    return located


def _find(
    model: Mapping[str, StoredTensor], prefix: str, megatron: str, arch: Architecture, path: Path
) -> tuple[list[str], StoredTensor]:
    """Return the keys and the tensor of a parameter under any of the names that Megatron gives it:
    layers and experts stacked or separate, norms fused or not, gate and up in one tensor or in two.
    """
    key, index = stacked_key(megatron)
    for name in (key, _other_name(key)):
        for separate_axes, candidate in enumerate(_candidates(prefix + name, prefix, index)):
            for keys in ([candidate], [candidate + "_w", candidate + "_v"]):
                if not model.keys() >= set(keys):
                    continue
                tensor = model[keys[0]]
                if len(keys) == 2:
                    tensor = tensor.append(model[keys[1]])
                stacked = list(zip(index, stack(arch, index), ("layers", "experts"), strict=False))
                for entry, size, axis in stacked[separate_axes:]:
                    if tensor.shape[0] != size:
                        raise UserError(
                            f"{path}: the checkpoint has {tensor.shape[0]} {axis}, config.json "
                            f"says {size}"
                        )
                    tensor = tensor.entry(entry)
                return keys, tensor
    raise UserError(f"{path}: tensor {prefix}{key} is missing; config.json promises it")


def _candidates(key: str, prefix: str, index: tuple[int, ...]) -> list[str]:
    """Return the key with all axes stacked, then with separate layers, then with separate experts
    too.
    """
    candidates = [key]
    if index:
        rest = key.removeprefix(prefix + _LAYER)
        candidates.append(f"{prefix}{_LAYER}{index[0]}.{rest}")
    if len(index) == 2:
        one_expert = f".experts.experts.{index[1]}."
        candidates.append(candidates[-1].replace(".experts.experts.", one_expert))
    return candidates


def _other_name(key: str) -> str:
    """Return the key in the other layer spec, which fuses norms into linear layers or does not. The
    local spec names the norm before experts as if it were fused.
    """
    for fused, local in LOCAL_NAMES.items():
        for name, other in ((fused, local), (local, fused)):
            if key.endswith(f".{name}"):
                return key.removesuffix(name) + other
    return key


def _model_tensors(checkpoint: MegatronCheckpoint) -> tuple[str, dict[str, StoredTensor]]:
    """Return the prefix and the tensors of the language model in a checkpoint that may also hold an
    optimizer.

    Wrappers put ``module.`` or ``model.`` before the names. Raises :class:`UserError` if there is
    not exactly one model.
    """
    prefixes = set()
    for key in checkpoint.tensors:
        prefix = key.removesuffix(_EMBEDDING)
        if key.endswith(_EMBEDDING) and set(prefix.split(".")) <= {"", "model", "module"}:
            prefixes.add(prefix)
    if len(prefixes) != 1:
        count = "no GPT model"
        if prefixes:
            count = f"{len(prefixes)} models"
        raise UserError(f"{checkpoint.path}: {count} in the checkpoint (looked for {_EMBEDDING})")
    prefix = prefixes.pop()
    parts = (prefix + "embedding.", prefix + "decoder.", prefix + "output_layer.")
    tensors = {}
    for key, tensor in checkpoint.tensors.items():
        if key.startswith(parts):
            tensors[key] = tensor
    return prefix, tensors
