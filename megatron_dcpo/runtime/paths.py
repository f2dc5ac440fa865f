"""Relative paths in a file: they are looked up next to that file, then in the working directory."""

from __future__ import annotations

import os
from pathlib import Path

_BESIDE: dict[
    str, Path
] = {}  # a path that is not beside the file that names it -> that file's directory


def beside(path: str, folder: Path) -> str:
    """Return ``path``, which a file in ``folder`` names, made absolute where something is there,
    else as it is: it is seen from the working directory then.
    """
    if not path or os.path.isabs(os.path.expanduser(path)) or folder.resolve() == Path.cwd():
        return path
    found = folder.absolute() / path
    if found.exists():
        return os.path.normpath(found)
    _BESIDE[os.path.normpath(path)] = folder.absolute()
    return path


def places(path: str | Path) -> str:
    """Return, as the end of an error message, where ``path`` was looked for; nothing for an
    absolute one.
    """
    if os.path.isabs(os.path.expanduser(path)):
        return ""
    folder = _BESIDE.get(os.path.normpath(path))
    return f" (looked for in {f'{folder} and ' if folder else ''}{Path.cwd()})"
