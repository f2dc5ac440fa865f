"""Let a program open its standard input, output and error by the names that Linux gives them.

``/dev/stdin`` is a link into /proc, which programs do not have. Opening such a name here gives a
copy of the descriptor that the program holds anyway, so nothing new can be reached. As with a pipe,
the copy shares its position with the original, and opening for writing erases nothing.
"""

from __future__ import annotations

import builtins
import io
import os
from typing import Any

_NAMES = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_FOLDERS = ("/dev/fd", "/proc/self/fd", "/proc/thread-self/fd")
for _folder in _FOLDERS:
    for _number in range(3):
        _NAMES[f"{_folder}/{_number}"] = _number
_real_open = io.open
_real_os_open = os.open
_real_stat = os.stat


def provide() -> None:
    """Replace ``open``, ``os.open`` and ``os.stat`` in this process."""
    builtins.open = io.open = _open
    os.open = _os_open
    os.stat = _stat
    # modules ask these sets what the functions can do
    for known in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
        if _real_os_open in known:
            known.add(_os_open)
        if _real_stat in known:
            known.add(_stat)


def _descriptor(file: object) -> int | None:
    """Return 0, 1 or 2 for a name of a standard file, None for everything else."""
    try:
        name = os.fspath(file)  # type: ignore[call-overload]
    except TypeError:  # a descriptor, or nothing that can be opened
        return None
    if isinstance(name, bytes):
        name = os.fsdecode(name)
    return _NAMES.get(name)


def _open(file: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the builtin
    number = _descriptor(file)
    if number is None:
        return _real_open(file, *args, **kwargs)
    copy = os.dup(number)
    try:
        return _real_open(copy, *args, **kwargs)
    except BaseException:
        os.close(copy)
        raise


def _os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:  # noqa: ANN401
    number = _descriptor(path)
    if number is None:
        return _real_os_open(path, flags, *args, **kwargs)
    return os.dup(number)


def _stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:  # noqa: ANN401
    number = _descriptor(path)
    if number is None:
        return _real_stat(path, *args, **kwargs)
    return os.fstat(number)
