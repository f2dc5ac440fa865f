"""The parameters of a ``GPTModel`` in a checkpoint, whole and under any name Megatron gives them, as Hugging Face slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_dcpo.conversion.megatron_checkpoint import MegatronCheckpoint, StoredTensor, as_bytes
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import torch_dtype
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.peft_adapter import KEPT, SCALE, LowRank
from megatron_dcpo.weights.planner import Coordinates, Copy, Layout, interleavings, plan
from megatron_dcpo.weights.table import LOCAL_NAMES, hf_shapes

WHOLE_MODEL = Layout(make_vocab_size_divisible_by=1, transformer_engine=True)  # one rank, Transformer Engine's names
_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = "decoder.layers."
# Modules whose (empty) extra state Megatron expects in a checkpoint, in the local or the Transformer Engine spec.
_EXTRA_STATES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_EXTRA_STATES_QK = ("self_attention.q_layernorm", "self_attention.k_layernorm")


def row_copies(arch: Architecture) -> dict[str, list[Copy]]:
    """Megatron parameter (global layer numbers, Transformer Engine's names) -> its copies in order of its rows.

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


def checkpoint_key(megatron: str) -> tuple[str, int | None]:
    """``decoder.layers.7.mlp...`` -> (``decoder.layers.mlp...``, 7): layers are stacked in a checkpoint."""
    if not megatron.startswith(_LAYER):
        return megatron, None
    number, _, rest = megatron.removeprefix(_LAYER).partition(".")
    return _LAYER + rest, int(number)


def extra_states(arch: Architecture) -> dict[str, None]:
    modules = _EXTRA_STATES + (_EXTRA_STATES_QK if arch.qk_layernorm else ())
    layers = range(arch.num_layers)
    keys = [f"{_LAYER}{module}._extra_state/shard_{n}_{arch.num_layers}" for n in layers for module in modules]
    return dict.fromkeys([*keys, "decoder.final_layernorm._extra_state/shard_0_1"])


@dataclass(frozen=True)
class Slice:
    """Bytes of the Hugging Face tensor ``name`` from its byte ``start`` on: ``uint8``, contiguous, a view of a map."""

    name: str
    start: int
    values: Tensor


def slices(
    arch: Architecture, checkpoint: MegatronCheckpoint, located: Mapping[str, StoredTensor]
) -> Iterator[list[Slice]]:
    """For each Megatron parameter, its rows as slices of Hugging Face tensors, each tensor's in order; no padding. Merged
    with the adapter of the whole policy, which ``training.train=adapter`` leaves in a checkpoint.

    ``located``: what :func:`locate` returned.
    """
    for megatron, copies in row_copies(arch).items():
        blocks = checkpoint.blocks(located[megatron])
        parts = []
        for copy in copies:
            for first, block in blocks:
                low, high = max(copy.start, first), min(copy.start + copy.length, first + len(block))
                if low < high:
                    row, values = copy.hf_start + low - copy.start, block[low - first : high - first]
                    start = row * block[0].numel()
                    if (pair := _low_rank(checkpoint, copy.hf)) is not None:
                        values = _added(
                            values, torch_dtype(located[megatron].dtype), pair.part(0, row, row + high - low)
                        )
                    parts.append(Slice(copy.hf, start, values))
        yield parts


def _low_rank(checkpoint: MegatronCheckpoint, name: str) -> LowRank | None:
    """What a checkpoint of ``training.train=adapter`` adds to the Hugging Face tensor ``name``."""
    module = f"{KEPT}weight.{name.removesuffix('.weight')}"
    keys = f"{module}.lora_A.weight", f"{module}.lora_B.weight", SCALE
    if not all(key in checkpoint.tensors for key in keys):
        return None
    A, B, scale = (
        torch.cat([block for _, block in checkpoint.blocks(checkpoint.tensors[key])]).view(torch.float32).squeeze(-1)
        for key in keys
    )
    return LowRank(A, B, float(scale))


def _added(values: Tensor, dtype: torch.dtype, addition: Tensor) -> Tensor:
    """``values`` [rows, columns, bytes] of ``dtype`` plus ``addition`` [rows, columns] fp32, as bytes again."""
    total = addition.add_(values.clone().view(dtype).squeeze(-1))  # a map is not aligned
    return as_bytes(total.to(dtype)).view(values.shape)


def locate(arch: Architecture, checkpoint: MegatronCheckpoint) -> dict[str, StoredTensor]:
    """Every Megatron parameter in the checkpoint.

    Raises :class:`UserError` when the checkpoint lacks a tensor, has one too many, or of another shape.
    """
    path = checkpoint.path
    prefix, model = _model_tensors(checkpoint)
    used: set[str] = set()
    located = {}
    kinds = interleavings(arch, WHOLE_MODEL, Coordinates())
    for megatron, copies in row_copies(arch).items():
        tensor = located[megatron] = _find(model, prefix, megatron, arch, path, used)
        shape = megatron_shape(arch, copies)
        padded = kinds[megatron] == "vocab" and tensor.shape[0] > shape[0]
        if tensor.shape != ((tensor.shape[0], *shape[1:]) if padded else shape):
            raise UserError(f"{path}: {megatron} has shape {list(tensor.shape)}, config.json implies {list(shape)}")
    for key in sorted(set(model) - used):
        raise UserError(f"{path}: config.json has no place for the checkpoint's tensor {key}")
    return located


def _find(
    model: Mapping[str, StoredTensor], prefix: str, megatron: str, arch: Architecture, path: Path, used: set[str]
) -> StoredTensor:
    """The tensor under any of the names Megatron gives it: layers stacked or apart, norms fused or not."""
    key, layer = checkpoint_key(megatron)
    for name in (key, _local_name(key)):
        stacked = model.get(prefix + name)
        if stacked is not None:
            used.add(prefix + name)
            if layer is None:
                return stacked
            if stacked.shape[0] != arch.num_layers:
                raise UserError(
                    f"{path}: the checkpoint has {stacked.shape[0]} layers, config.json says {arch.num_layers}"
                )
            return stacked.at_layer(layer)
        apart = f"{prefix}{_LAYER}{layer}.{name.removeprefix(_LAYER)}"
        if apart in model:
            used.add(apart)
            return model[apart]
        gate, up = apart + "_w", apart + "_v"  # Megatron's singleton_local_shards
        if gate in model and up in model:
            used.update((gate, up))
            return model[gate].append(model[up])
    raise UserError(f"{path}: tensor {prefix}{key} is missing; config.json promises it")


def _local_name(key: str) -> str:
    for fused, local in LOCAL_NAMES.items():
        if key.endswith(fused):
            return key.removesuffix(fused) + local
    return key


def _model_tensors(checkpoint: MegatronCheckpoint) -> tuple[str, dict[str, StoredTensor]]:
    """(prefix, tensors) of the language model in a checkpoint that may hold an optimizer too.

    Wrappers put ``module.`` or ``model.`` before the names. Raises :class:`UserError` when there is no model.
    """
    prefixes = {key.removesuffix(_EMBEDDING) for key in checkpoint.tensors if key.endswith(_EMBEDDING)}
    prefixes = {prefix for prefix in prefixes if set(prefix.split(".")) <= {"", "model", "module"}}
    if len(prefixes) != 1:
        count = f"{len(prefixes)} models" if prefixes else "no GPT model"
        raise UserError(f"{checkpoint.path}: {count} in the checkpoint (looked for {_EMBEDDING})")
    prefix = prefixes.pop()
    parts = tuple(prefix + part for part in ("embedding.", "decoder.", "output_layer."))
    return prefix, {key: tensor for key, tensor in checkpoint.tensors.items() if key.startswith(parts)}
