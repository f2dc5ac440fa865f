"""A low-rank adapter on disk, in PEFT's format: ``adapter_config.json`` and
``adapter_model.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from megatron_dcpo.runtime.files import new_directory

DIRECTORY = "adapter"  # in the run's directory
KEPT = "adapter."  # the prefix of its tensors' names in a training's checkpoint
SCALE = "adapter.scale"
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LowRank:
    """``A`` [rank, in] and ``B`` [out, rank] of one projection, fp32; ``scale`` is alpha / rank."""

    A: Tensor
    B: Tensor
    scale: float

    def part(self, dim: int, start: int, stop: int) -> Tensor:
        """Return scale * B A between two indices of dimension ``dim``."""
        A = self.A.detach()
        B = self.B.detach()
        product = B[start:stop] @ A if dim == 0 else B @ A[:, start:stop]
        return product.mul_(self.scale)


def write_adapter(
    directory: Path,
    tensors: Mapping[str, Tensor],
    rank: int,
    alpha: float,
    targets: Sequence[str],
    base: str,
) -> None:
    """Write ``tensors`` (``model.layers.0.self_attn.q_proj.lora_A.weight`` [rank, in],
    ``...lora_B.weight`` [out, rank]) to ``directory``, for the model ``base``.
    """
    peft: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": list(targets),
        "bias": "none",
        "inference_mode": True,
    }
    whole = {
        _PREFIX + name: tensor.detach().cpu().contiguous()
        for name, tensor in tensors.items()
    }
    with new_directory(directory, overwrite=True) as temporary:
        save_file(whole, temporary / "adapter_model.safetensors")
        (temporary / "adapter_config.json").write_text(
            json.dumps(peft, indent=1) + "\n"
        )
