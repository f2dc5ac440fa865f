#!/usr/bin/env python3
"""Name, shape, dtype and SHA-256 of every tensor of a checkpoint after de-sharding.

    python tools/inspect_checkpoint.py DIR [--json] [--no-hash]

DIR is a Hugging Face directory or a Megatron torch_dist checkpoint (or the directory whose
latest_checkpointed_iteration.txt names one). Needs no GPU and little memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from megatron_dcpo.conversion.checkpoint_metadata import METADATA
from megatron_dcpo.conversion.megatron_checkpoint import (
    LATEST,
    MegatronCheckpoint,
    StoredTensor,
    as_bytes,
    find_checkpoint,
)
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.dtypes import dtype_bytes
from megatron_dcpo.weights.hf_checkpoint import INDEX, SINGLE_FILE, HFReader, Specs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", metavar="DIR", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--no-hash", action="store_true", help="do not read the tensors")
    args = parser.parse_args()
    try:
        report = inspect_checkpoint(args.dir, hashes=not args.no_hash)
    except UserError as error:
        print(f"inspect_checkpoint: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    for name, facts in report["tensors"].items():
        print(
            f"{facts.get('sha256', '')[:16]:16s}  {facts['dtype']:9s} {facts['shape']!s:20s} {name}"
        )
    print(f"{report['format']}: {len(report['tensors'])} tensors, {report['bytes'] / 1e9:.3f} GB")
    return 0


def inspect_checkpoint(
    path: Path, hashes: bool = True, progress: Callable[[int], None] = lambda nbytes: None
) -> dict[str, Any]:
    """``{"format", "bytes", "tensors": {name: {"shape", "dtype", "bytes", "sha256"}}}``; one tensor
    in memory at a time.

    ``sha256`` is over the little-endian bytes of the whole tensor in row-major order, so it does
    not depend on files or layout. Raises :class:`UserError` for what is not a checkpoint or a
    damaged one.
    """
    specs: Specs
    if (path / METADATA).is_file() or (path / LATEST).is_file():
        checkpoint = MegatronCheckpoint(find_checkpoint(path))
        kind, specs = (
            "torch_dist",
            {key: (t.shape, t.dtype) for key, t in checkpoint.tensors.items()},
        )

        def digest(name: str) -> str:
            return _sha256(checkpoint, checkpoint.tensors[name])

    elif (path / INDEX).is_file() or (path / SINGLE_FILE).is_file():
        reader = HFReader(path)
        kind, specs = "huggingface", reader.specs

        def digest(name: str) -> str:
            return hashlib.sha256(as_bytes(reader.tensor(name)).numpy().data).hexdigest()

    elif not path.is_dir():
        raise UserError(f"{path} does not exist; name a checkpoint directory")
    else:
        raise UserError(f"{path} is neither a Hugging Face directory nor a torch_dist checkpoint")
    tensors = {name: _describe(*specs[name]) for name in sorted(specs)}
    if hashes:
        for name, facts in tensors.items():
            facts["sha256"] = digest(name)
            progress(facts["bytes"])
    return {
        "format": kind,
        "bytes": sum(facts["bytes"] for facts in tensors.values()),
        "tensors": tensors,
    }


def _describe(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": dtype, "bytes": math.prod(shape) * dtype_bytes(dtype)}


def _sha256(checkpoint: MegatronCheckpoint, tensor: StoredTensor) -> str:
    """Of the whole tensor; layer by layer and expert by expert where they are stacked along its
    leading axes.
    """
    digest = hashlib.sha256()
    for matrix in _matrices(tensor):
        for _, block in checkpoint.blocks(matrix):
            digest.update(block.numpy().data)
    return digest.hexdigest()


def _matrices(tensor: StoredTensor) -> Iterator[StoredTensor]:
    if len(tensor.shape) <= 2:
        yield tensor
        return
    for number in range(tensor.shape[0]):
        yield from _matrices(tensor.entry(number))


if __name__ == "__main__":
    sys.exit(main())
