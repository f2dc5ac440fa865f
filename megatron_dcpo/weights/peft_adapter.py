"""A low-rank adapter on disk, in PEFT's format: ``adapter_config.json`` and
``adapter_model.safetensors``. Ours are written so, and ours and others' are read to go on from.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dcpo.architectures.config_json import Architecture, read_architecture
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.files import new_directory
from megatron_dcpo.weights.adapter_shape import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    AdapterShape,
    factor_names,
    read_shape,
)
from megatron_dcpo.weights.hf_checkpoint import HFReader
from megatron_dcpo.weights.planner import WeightSlice

KEPT = "adapter."  # the prefix of its tensors' names in a training's checkpoint
SCALE = "adapter.scale"  # of all pairs; scale_key() of each one if they differ


def scale_key(module: str) -> str:
    """Return the name of a pair's scale in a training's checkpoint, where the scales differ."""
    return f"{SCALE}.{module}"


@dataclass(frozen=True)
class LowRank:
    """``A`` [rank, in] and ``B`` [out, rank] of one projection, fp32; ``scale`` is what their
    product is multiplied by, alpha / rank.
    """

    A: Tensor
    B: Tensor
    scale: float

    def part(self, dim: int, start: int, stop: int) -> Tensor:
        """Return scale * B A between two indices of dimension ``dim``."""
        A = self.A.detach()
        B = self.B.detach()
        product = B[start:stop] @ A if dim == 0 else B @ A[:, start:stop]
        return product.mul_(self.scale)


def read_low_rank(directory: Path, arch: Architecture) -> dict[str, LowRank]:
    """Return the pairs of the adapter in ``directory``, on the CPU, by the tensor to which their
    product is added. Raises :class:`UserError` as
    :func:`megatron_dcpo.weights.adapter_shape.read_shape` does, and for values that are not finite.
    """
    shape = read_shape(directory, arch)
    tensors = load_file(directory / WEIGHTS)
    pairs = {}
    for module, scale in shape.scales.items():
        A, B = (tensors[name].float() for name in factor_names(module))
        if not (torch.isfinite(A).all() and torch.isfinite(B).all()):
            raise UserError(f"{directory}: the factors of {module} hold values that are not finite")
        pairs[f"{module}.weight"] = LowRank(A=A, B=B, scale=scale)
    return pairs


def merged_tensors(model_dir: Path, directory: Path) -> Iterator[WeightSlice]:
    """Yield every tensor of a Hugging Face model to which the adapter in ``directory`` adds, with
    the addition, in fp32. Raises :class:`UserError` as
    :func:`read_low_rank` does.
    """
    reader = HFReader(model_dir)
    for name, pair in read_low_rank(directory, read_architecture(model_dir)).items():
        stored = reader.tensor(name)
        total = pair.part(0, 0, stored.shape[0]).add_(stored)
        yield WeightSlice(name=name, dim=0, start=0, values=total)


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], shape: AdapterShape, base: str
) -> None:
    """Write ``tensors`` (``model.layers.0.self_attn.q_proj.lora_A.weight`` [rank, in],
    ``...lora_B.weight`` [out, rank]) to ``directory``, for the model ``base``.
    """
    rank = Counter(shape.ranks.values()).most_common(1)[0][0]
    alphas = {module: shape.scales[module] * shape.ranks[module] for module in shape.ranks}
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    peft: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(shape),
        "bias": "none",
        "inference_mode": True,
    }
    rank_pattern = {module: r for module, r in shape.ranks.items() if r != rank}
    alpha_pattern = {module: a for module, a in alphas.items() if a != alpha}
    if rank_pattern:
        peft["rank_pattern"] = {re.escape(module): value for module, value in rank_pattern.items()}
    if alpha_pattern:
        peft["alpha_pattern"] = {
            re.escape(module): value for module, value in alpha_pattern.items()
        }
    whole = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with new_directory(directory, overwrite=True) as temporary:
        save_file(whole, temporary / WEIGHTS)
        (temporary / CONFIG).write_text(json.dumps(peft, indent=1) + "\n")


def _target_modules(shape: AdapterShape) -> list[str]:
    """Return the projections if each is adapted in every adapted layer, else the full names."""
    layers = {module.split(".")[2] for module in shape.ranks}
    projections = list(dict.fromkeys(module.rpartition(".")[2] for module in shape.ranks))
    every_layer = range(len(layers))
    if layers == {str(layer) for layer in every_layer} and len(shape.ranks) == len(layers) * len(
        projections
    ):
        return projections
    return list(shape.ranks)
