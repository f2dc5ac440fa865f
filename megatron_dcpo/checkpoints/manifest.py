"""What makes a checkpoint complete and intact: a manifest with the size and SHA-256 of each of its files.

The manifest ``integrity.json`` is written last, into a directory that is renamed to ``iter_0000120`` only then. A
directory of that name without a valid manifest was damaged later.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST = "integrity.json"
LATEST = "latest_checkpointed_iteration.txt"


def iteration_dir(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def iterations(directory: Path) -> list[int]:
    """The iterations of which ``directory`` holds a checkpoint, intact or not, oldest first."""
    names = [path.name.removeprefix("iter_") for path in directory.glob("iter_*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def latest_iteration(directory: Path) -> int | None:
    """What ``latest_checkpointed_iteration.txt`` names; without a usable file the newest there is, ``None`` for none."""
    try:
        text = (directory / LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        text = ""
    present = iterations(directory)
    return int(text) if text.isdecimal() else (present[-1] if present else None)


def digest(path: Path) -> dict[str, Any]:
    """``{"bytes": size, "sha256": hexadecimal}`` of a file."""
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(directory: Path, iteration: int, files: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of ``files`` (name -> :func:`digest`) and force everything to the disk."""
    text = json.dumps({"iteration": iteration, "files": dict(sorted(files.items()))}, indent=1)
    with (directory / MANIFEST).open("w") as file:
        file.write(text + "\n")
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
    """The manifest's files. Raises :class:`ValueError` saying what is wrong with the manifest."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files = dict(manifest["files"])
        wrong = manifest["iteration"] != iteration or not all({"bytes", "sha256"} <= set(f) for f in files.values())
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError):
        wrong = True
    if wrong:
        raise ValueError(f"{MANIFEST} is damaged")
    return files


def damage(directory: Path, files: Iterable[tuple[str, dict[str, Any]]]) -> str | None:
    """The first of ``files`` that is not as the manifest says, or ``None``."""
    for name, expected in files:
        path = directory / name
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if digest(path)["sha256"] != expected["sha256"]:
                return f"{name} has changed since it was written (SHA-256)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None
