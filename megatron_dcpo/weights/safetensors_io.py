"""Hugging Face checkpoint directories: memory-mapped slices in, sharded safetensors out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_dcpo.errors import UserError
from megatron_dcpo.weights.architecture import Architecture
from megatron_dcpo.weights.planner import Copy
from megatron_dcpo.weights.table import hf_shapes

INDEX = "model.safetensors.index.json"


class HFReader:
    """Reads slices of the tensors in ``model_dir``; nothing but the requested bytes leaves the memory map."""

    def __init__(self, model_dir: str | Path) -> None:
        self.model_dir = Path(model_dir)
        self._file_of = _tensor_files(self.model_dir)
        self._open: dict[str, Any] = {}

    def names(self) -> set[str]:
        return set(self._file_of)

    def slice(self, name: str) -> Any:
        """The lazily read tensor ``name``: index it to read. Raises :class:`UserError` when it is not there."""
        if name not in self._file_of:
            raise UserError(f"{self.model_dir}: tensor {name} is missing; config.json promises it")
        file = self._file_of[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(str(self.model_dir / file), framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.model_dir / file}: not a readable safetensors file ({error})") from None
        return self._open[file].get_slice(name)

    def check(self, arch: Architecture) -> None:
        """Raise :class:`UserError` when a tensor is missing or its shape contradicts ``config.json``."""
        for name, shape in hf_shapes(arch).items():
            found = tuple(self.slice(name).get_shape())
            if found != shape:
                raise UserError(f"{self.model_dir}: {name} has shape {list(found)}, config.json implies {list(shape)}")


def _tensor_files(model_dir: Path) -> dict[str, str]:
    index = model_dir / INDEX
    if index.is_file():
        files = dict(json.loads(index.read_text())["weight_map"])
        for file in sorted(set(files.values())):
            if not (model_dir / file).is_file():
                raise UserError(f"{model_dir / file} is missing; {INDEX} names it")
        return files
    single = model_dir / "model.safetensors"
    if not single.is_file():
        raise UserError(f"{model_dir} holds neither model.safetensors nor {INDEX}; no weights to read")
    try:
        with safe_open(str(single), framework="pt") as handle:
            return dict.fromkeys(handle.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{single}: not a readable safetensors file ({error})") from None


@torch.no_grad()
def load_into(reader: HFReader, copies: Iterable[Copy], parameters: Mapping[str, torch.Tensor]) -> None:
    """Execute ``copies`` from the checkpoint into ``parameters``; padding rows are set to zero."""
    padded = {copy.megatron for copy in copies if copy.megatron in parameters}
    for name in padded:
        parameters[name].zero_()
    for copy in copies:
        source = reader.slice(copy.hf)
        values = source[copy.hf_start : copy.hf_stop] if copy.dim == 0 else source[:, copy.hf_start : copy.hf_stop]
        parameters[copy.megatron].narrow(copy.dim, copy.start, copy.length).copy_(values)


def shards(arch: Architecture, dtype: torch.dtype, max_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Split the architecture's tensors, in order, into files of at most ``max_bytes`` (one tensor at least)."""
    result: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in hf_shapes(arch).items():
        nbytes = dtype.itemsize * int(torch.Size(shape).numel())
        if result[-1] and size + nbytes > max_bytes:
            result.append({})
            size = 0
        result[-1][name] = shape
        size += nbytes
    return result


def write_checkpoint(
    out: Path,
    source_dir: Path,
    arch: Architecture,
    dtype: torch.dtype,
    collect: Callable[[dict[str, tuple[int, ...]]], dict[str, torch.Tensor]],
    writer: bool,
    max_bytes: int = 5 * 2**30,
) -> None:
    """Write a Hugging Face directory shard by shard: ``collect`` returns the tensors of one shard.

    Collective where ``collect`` is; only the ``writer`` touches the disk, under a temporary name that is renamed when
    complete. Everything that is not weights (config, tokenizer, templates) is taken from ``source_dir``.
    """
    temporary = out.with_name(out.name + ".tmp")
    if writer:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    parts = shards(arch, dtype, max_bytes)
    index: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = collect(part)
        index |= dict.fromkeys(part, file)
        if writer:
            save_file({name: tensors[name].contiguous() for name in part}, temporary / file, metadata={"format": "pt"})
    if not writer:
        return
    if len(parts) > 1:
        total = sum(dtype.itemsize * int(torch.Size(s).numel()) for part in parts for s in part.values())
        (temporary / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2))
    _copy_side_files(source_dir, temporary, dtype)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)


def _copy_side_files(source_dir: Path, out: Path, dtype: torch.dtype) -> None:
    for path in source_dir.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != INDEX:
            shutil.copyfile(path, out / path.name)
    config = json.loads((out / "config.json").read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
