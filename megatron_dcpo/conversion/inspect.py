"""Every tensor of a checkpoint, Hugging Face or Megatron, as it is after de-sharding."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dcpo.conversion.megatron_checkpoint import (
    MegatronCheckpoint,
    StoredTensor,
    as_bytes,
    find_checkpoint,
    is_checkpoint,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.hf_checkpoint import INDEX, SINGLE_FILE, HFReader, Specs


def inspect_checkpoint(
    path: Path, hashes: bool = True, progress: Callable[[int], None] = lambda nbytes: None
) -> dict[str, Any]:
    """``{"format", "bytes", "tensors": {name: {"shape", "dtype", "bytes", "sha256"}}}``; one tensor in memory at a time.

    ``sha256`` is over the little-endian bytes of the whole tensor in row-major order, so it does not depend on files or
    layout. Raises :class:`UserError` for what is not a checkpoint or a damaged one.
    """
    specs: Specs
    if is_checkpoint(path):
        checkpoint = MegatronCheckpoint(find_checkpoint(path))
        kind, specs = "torch_dist", {key: (t.shape, t.dtype) for key, t in checkpoint.tensors.items()}
        digest: Callable[[str], str] = lambda name: _sha256(checkpoint, checkpoint.tensors[name])  # noqa: E731
    elif (path / INDEX).is_file() or (path / SINGLE_FILE).is_file():
        reader = HFReader(path)
        kind, specs = "huggingface", reader.specs
        digest = lambda name: hashlib.sha256(as_bytes(reader.tensor(name)).numpy().data).hexdigest()  # noqa: E731
    elif not path.is_dir():
        raise UserError(f"{path} does not exist; name a checkpoint directory")
    else:
        raise UserError(f"{path} is neither a Hugging Face directory nor a torch_dist checkpoint")
    tensors = {name: _describe(*specs[name]) for name in sorted(specs)}
    if hashes:
        for name, facts in tensors.items():
            facts["sha256"] = digest(name)
            progress(facts["bytes"])
    return {"format": kind, "bytes": sum(facts["bytes"] for facts in tensors.values()), "tensors": tensors}


def _describe(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * dtype_bytes(dtype)}


def _sha256(checkpoint: MegatronCheckpoint, tensor: StoredTensor) -> str:
    """Of the whole tensor; layer by layer when layers are stacked along its leading axis."""
    digest = hashlib.sha256()
    layers = [tensor.at_layer(n) for n in range(tensor.shape[0])] if len(tensor.shape) > 2 else [tensor]
    for layer in layers:
        for _, block in checkpoint.blocks(layer):
            digest.update(block.numpy().data)
    return digest.hexdigest()
