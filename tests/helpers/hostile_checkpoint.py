"""Crafts what a checkpoint should not hold, and makes its manifest agree with it."""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_dcpo.checkpoints.manifest import MANIFEST, digest, write_manifest


class Command:
    """Unpickled, it runs ``command`` in a shell."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def resign(checkpoint: Path) -> None:
    """The manifest of the files as they are."""
    files = {path.name: digest(path) for path in checkpoint.iterdir() if path.name != MANIFEST}
    write_manifest(checkpoint, int(checkpoint.name.removeprefix("iter_")), files, {})


def edit_metadata(checkpoint: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def code_in_metadata(checkpoint: Path, command: str) -> None:
    edit_metadata(checkpoint, lambda metadata: setattr(metadata, "planner_data", Command(command)))


def code_beside_the_tensors(checkpoint: Path, command: str) -> None:
    """In an object that Megatron stores with the tensors (``_extra_state``)."""
    content = io.BytesIO()
    torch.save(Command(command), content)

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if "_extra_state" in index.fqn:
                info.relative_path, info.offset, info.length = (
                    "code.distcp",
                    0,
                    len(content.getvalue()),
                )

    (checkpoint / "code.distcp").write_bytes(content.getvalue())
    edit_metadata(checkpoint, change)


def code_in_common(checkpoint: Path, command: str) -> None:
    common = torch.load(checkpoint / "common.pt", weights_only=True)
    torch.save(
        common | {"run": common["run"] | {"engine": Command(command)}}, checkpoint / "common.pt"
    )


def an_odd_number(checkpoint: Path, command: str) -> None:
    common = torch.load(checkpoint / "common.pt", weights_only=True)
    common["opt_param_scheduler"]["num_steps"] = torch.zeros(0)
    torch.save(common, checkpoint / "common.pt")


def a_terabyte(checkpoint: Path, command: str) -> None:
    """A string that claims to be that long."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x")


def a_large_memo(checkpoint: Path, command: str) -> None:
    """Python's unpickler in C makes room for as many objects as this number says."""
    (checkpoint / ".metadata").write_bytes(b"\x80\x04Nr" + struct.pack("<I", (1 << 32) - 1) + b".")


def a_file_elsewhere(checkpoint: Path, command: str) -> None:
    def change(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../../config.yaml"

    edit_metadata(checkpoint, change)


def a_negative_start(checkpoint: Path, command: str) -> None:
    edit_metadata(
        checkpoint,
        lambda metadata: setattr(next(iter(metadata.storage_data.values())), "offset", -(1 << 20)),
    )


def a_changed_class(checkpoint: Path, command: str) -> None:
    """BUILD with a class in the place of an object sets attributes of the class."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (checkpoint / ".metadata").write_bytes(
        b"\x80\x02" + name + b"N}U\x07version" + b"U\x03odds\x86b."
    )


# name -> (the crafting, what the error line says)
HOSTILE: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "code in the metadata": (
        code_in_metadata,
        r"\.metadata is damaged \(UnpicklingError: it names posix\.system",
    ),
    "code beside the tensors": (
        code_beside_the_tensors,
        r"cannot be read \(UnpicklingError: Weights only load failed",
    ),
    "code in common.pt": (
        code_in_common,
        r"cannot be read \(common\.pt: UnpicklingError: Weights only load failed",
    ),
    "an odd number": (
        an_odd_number,
        r"cannot be read \(CheckpointingException: opt_param_scheduler or rng_state",
    ),
    "a terabyte": (a_terabyte, r"\.metadata is damaged"),
    "a large memo": (
        a_large_memo,
        r"\.metadata is damaged \(ValueError: not the metadata of a checkpoint",
    ),
    "a file elsewhere": (
        a_file_elsewhere,
        r"\.metadata is damaged .* names the file '../../config\.yaml'",
    ),
    "a negative start": (
        a_negative_start,
        r"\.metadata is damaged .* has a size that is not a count",
    ),
    "a changed class": (
        a_changed_class,
        r"\.metadata is damaged \(UnpicklingError: it changes a class",
    ),
}
