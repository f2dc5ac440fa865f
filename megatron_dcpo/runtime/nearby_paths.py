"""Relative paths in a file: they are looked up next to that file, then in the working directory."""

from __future__ import annotations

import glob
import os
from pathlib import Path

# For a path that does not exist next to the file that names it: the directory of that file.
_BESIDE: dict[str, Path] = {}


def beside(path: str, folder: Path) -> str:
    """Return ``path``, which a file in ``folder`` names: as an absolute path if it exists relative
    to that folder, otherwise unchanged, so that it is relative to the working directory.
    """
    if not path or os.path.isabs(os.path.expanduser(path)) or folder.resolve() == Path.cwd():
        return path
    candidate = folder.absolute() / path
    if candidate.exists() or (glob.has_magic(path) and glob.glob(str(candidate))):
        return os.path.normpath(candidate)
    _BESIDE[os.path.normpath(path)] = folder.absolute()
    return path


def places(path: str | Path) -> str:
    """Return the end of an error message, the directories in which ``path`` was looked for; nothing
    for an absolute path.
    """
    if os.path.isabs(os.path.expanduser(path)):
        return ""
    directories = [str(Path.cwd())]
    folder = _BESIDE.get(os.path.normpath(path))
    if folder:
        directories.insert(0, str(folder))
    return f" (looked for in {' and '.join(directories)})"
