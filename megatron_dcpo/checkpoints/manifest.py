"""The manifest that makes a checkpoint complete and intact: size and SHA-256 of each of its files,
and a checksum of each group of tensors (:mod:`megatron_dcpo.checkpoints.staleness`).

The manifest ``integrity.json`` is written last, and only then is the directory renamed to
``iter_0000120``. A directory of that name without a valid manifest was damaged later.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import parse_json

MANIFEST = "integrity.json"
_NUMBER = re.compile("[0-9]{1,18}")
_PLAIN_NAME = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9._-]*")  # a file of the directory itself
LATEST = "latest_checkpointed_iteration.txt"


def iteration_dir(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def iterations(directory: Path) -> list[int]:
    """Return the iterations whose checkpoints are in ``directory``, intact or not, oldest first."""
    names = [path.name.removeprefix("iter_") for path in directory.glob("iter_*") if path.is_dir()]
    return sorted(int(name) for name in names if _NUMBER.fullmatch(name))


def latest_iteration(directory: Path) -> int | None:
    """Return the iteration that ``latest_checkpointed_iteration.txt`` names; without a usable file
    the newest in the directory, ``None`` if there is none.
    """
    try:
        text = (directory / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    if _NUMBER.fullmatch(text):
        return int(text)
    return max(iterations(directory), default=None)


def check_fresh(run_dir: Path, announced: int | None, resume: str) -> None:
    """Raise :class:`UserError` if a run without ``--resume auto`` would overwrite the checkpoint
    that another one has ``announced`` in ``run_dir``.
    """
    if announced is not None and resume == "none":
        raise UserError(
            f"{run_dir} already holds a checkpoint of step {announced}; pass --resume auto to "
            "continue it, or another run_dir to start again"
        )


def digest(path: Path) -> dict[str, Any]:
    """Return ``{"bytes": size, "sha256": hexadecimal}`` of a file."""
    with path.open("rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def write_manifest(
    directory: Path,
    iteration: int,
    files: dict[str, dict[str, Any]],
    groups: Mapping[str, int],
) -> None:
    """Write the manifest of ``files``, the :func:`digest` of each by name, and of the checksums of
    ``groups``; force everything to the disk.
    """
    manifest = {
        "iteration": iteration,
        "files": dict(sorted(files.items())),
        "groups": {group: f"{value:016x}" for group, value in groups.items()},
    }
    with (directory / MANIFEST).open("w") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    """Make renames and new names in ``directory`` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def listed_files(directory: Path, iteration: int) -> dict[str, dict[str, Any]]:
    """Return the manifest's files. Raises :class:`ValueError` saying what is wrong with the
    manifest.
    """
    path = directory / MANIFEST
    damaged = False
    try:
        manifest = parse_json(path.read_bytes())
        files: dict[str, dict[str, Any]] = dict(manifest["files"])
        damaged = manifest["iteration"] != iteration
        for entry in files.values():
            if type(entry["bytes"]) is not int or not isinstance(entry["sha256"], str):
                damaged = True
        checksums_of(manifest)
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, LookupError, TypeError):
        damaged = True
    if damaged:
        raise ValueError(f"{MANIFEST} is damaged")
    for name in files:
        if not _PLAIN_NAME.fullmatch(name):
            raise ValueError(
                f"{MANIFEST} names {name!r:.80}, which is not a file of this directory"
            )
    return files


def checksums_in(directory: Path) -> dict[str, int]:
    """Return the checksums of groups in the manifest of an intact checkpoint; none of one that was
    written without them.
    """
    return checksums_of(parse_json((directory / MANIFEST).read_bytes()))


def checksums_of(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Return the checksums of groups in a manifest. Raises ValueError, LookupError or TypeError if
    it is damaged.
    """
    groups = dict(manifest.get("groups", {}))
    return {group: int(value, base=16) for group, value in groups.items()}


def damage(
    directory: Path,
    files: Iterable[tuple[str, dict[str, Any]]],
    kept: dict[Path, bytes] | None = None,
) -> str | None:
    """Return what is wrong with the first of ``files`` that contradicts the manifest, or ``None``.
    The contents that were read are added to ``kept``.
    """
    for name, expected in files:
        path = directory / name
        try:
            if not path.is_file():
                return f"{name} is {'not a file' if path.exists() else 'missing'}"
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            content = path.read_bytes()
            if hashlib.sha256(content).hexdigest() != expected["sha256"]:
                return f"{name} has changed since it was written (SHA-256)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if kept is not None:
            kept[path] = content
    return None
