"""A directory that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dcpo.errors import UserError


@contextmanager
def new_directory(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield ``out`` under a temporary name; rename it when the block ends, remove it when the block fails.

    What a killed process left under the temporary name is removed by the next one. Raises :class:`UserError` when
    ``out`` exists (unless ``overwrite``; an empty directory is fine), or when the disk refuses.
    """
    if not overwrite and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists; remove it, choose another name, or pass --overwrite")
    temporary = _temporary(out)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if out.is_dir():
            shutil.rmtree(out)
        elif out.exists():
            out.unlink()
        os.replace(temporary, out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot write {out}: {error.strerror or error}; nothing was left behind") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def require_apart(target: Path, *sources: Path) -> None:
    """Raise :class:`UserError` when writing ``target``, or its temporary name, would replace one of the ``sources``."""
    for source in sources:
        resolved = source.resolve()
        for place in (target, _temporary(target)):
            if place.resolve() in (resolved, *resolved.parents):
                raise UserError(f"cannot write {place}: it holds the input {source}; choose another name")


def _temporary(out: Path) -> Path:
    return out.with_name(out.name + ".tmp")


def require_space(out: Path, nbytes: int) -> None:
    """Raise :class:`UserError` when the file system of ``out`` has less than ``nbytes`` left."""
    parent = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise UserError(f"cannot write {out}: needs {nbytes / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB free")
