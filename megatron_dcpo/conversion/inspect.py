"""Every tensor of a checkpoint, Hugging Face or Megatron, as it is after de-sharding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dcpo.conversion.lazy import LazyTensor, open_files
from megatron_dcpo.conversion.torch_dist import find_checkpoint, is_checkpoint, read_checkpoint
from megatron_dcpo.conversion.transfer import Stream, transfer
from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.hf_checkpoint import INDEX, read_tensors


def inspect_checkpoint(
    path: Path, hashes: bool = True, progress: Callable[[int], None] = lambda nbytes: None
) -> dict[str, Any]:
    """``{"format", "bytes", "tensors": {name: {"shape", "dtype", "bytes", "sha256"}}}``; streams, holds no tensor.

    ``sha256`` is over the little-endian bytes of the whole tensor in row-major order, so it does not depend on files or
    layout. Raises :class:`UserError` for what is no checkpoint or a damaged one.
    """
    if is_checkpoint(path):
        kind, path = "torch_dist", find_checkpoint(path)
        tensors = {key: stored.whole() for key, stored in read_checkpoint(path).items()}
    elif (path / INDEX).is_file() or (path / "model.safetensors").is_file():
        kind, tensors = "huggingface", read_tensors(path)
    elif not path.is_dir():
        raise UserError(f"{path} does not exist; name a checkpoint directory")
    else:
        raise UserError(f"{path} is neither a Hugging Face directory nor a torch_dist checkpoint")
    found: dict[str, str] = {}
    if hashes:
        with open_files() as files:
            found = transfer(files, [Stream(((name, tensor),)) for name, tensor in tensors.items()], progress)
    return {
        "format": kind,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "tensors": {name: _describe(tensors[name], found.get(name)) for name in sorted(tensors)},
    }


def _describe(tensor: LazyTensor, sha256: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.nbytes}
    return facts if sha256 is None else facts | {"sha256": sha256}
