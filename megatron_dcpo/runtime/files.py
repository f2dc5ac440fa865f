"""Files and directories that appear complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_dcpo.errors import UserError

_MARKER = ".being-written"  # locked by the process that writes the directory
_EARLIER = ".earlier"  # in the new directory, the one that it replaces, until that is removed


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write ``path`` (text as UTF-8) to the disk; an older file stays until the new one is
    complete. What is no regular file, such as ``/dev/stdout``, is written as it is. Raises
    :class:`OSError`.
    """
    content = data.encode() if isinstance(data, str) else data
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a file that is written to the disk and replaces ``path`` when the block
    ends, and is removed when the block fails.
    """
    temporary = path.with_name(f"{path.name}.{threading.get_ident()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say what it was about
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_directory(out: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield ``out`` under a temporary name; rename it when the block ends, remove it when the block
    fails. An earlier ``out`` is whole until the new one is there.

    SIGTERM fails the block like Ctrl-C does. What a killed process left under the temporary name is
    removed by the next one, and nothing else is. Raises :class:`UserError` when ``out`` exists
    (unless ``overwrite``; an empty directory is fine), when another process is writing it, or when
    the disk cannot be written.
    """
    if out.is_symlink() or (
        not overwrite and out.exists() and not (out.is_dir() and not any(out.iterdir()))
    ):
        raise UserError(f"{out} exists; remove it, choose another name, or pass --overwrite")
    temporary = temporary_name(out)
    created = [
        parent for parent in temporary.absolute().parents if not parent.exists()
    ]  # innermost first
    try:
        lock = _claim(temporary, out)
        try:
            with _termination_raises():
                yield temporary
            _replace(temporary, out)
            shutil.rmtree(out / _EARLIER, ignore_errors=True)
            (out / _MARKER).unlink()
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            os.close(lock)
    except BaseException as error:
        for parent in created:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError):
            raise UserError(
                f"cannot write {out}: {error.strerror or error}; nothing was left behind"
            ) from None
        raise


def _replace(temporary: Path, out: Path) -> None:
    """Give ``temporary`` the name ``out``; a directory that has it moves inside, and back if that
    fails.
    """
    if not out.is_dir():
        out.unlink(missing_ok=True)
        os.replace(temporary, out)
        return
    os.replace(out, temporary / _EARLIER)
    try:
        os.replace(temporary, out)
    except OSError:
        os.replace(temporary / _EARLIER, out)
        raise


def _claim(temporary: Path, out: Path) -> int:
    """Create ``temporary`` again, with the lock of this process in it; return the descriptor that
    holds the lock.
    """
    marker = temporary / _MARKER
    if temporary.exists() or temporary.is_symlink():
        if not marker.is_file() or temporary.is_symlink():
            raise UserError(
                f"{temporary} is in the way of writing {out}; remove it or choose another name"
            )
        stale = _lock(marker, out)
        shutil.rmtree(temporary)
        os.close(stale)
    temporary.mkdir(parents=True)
    marker.touch()
    return _lock(marker, out)


def _lock(marker: Path, out: Path) -> int:
    descriptor = os.open(marker, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(descriptor)
            raise UserError(
                f"another process is writing {out}; wait for it or choose another name"
            ) from None
        # A file system without locks: only the name protects the directory.
    return descriptor


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Let SIGTERM end the program by an exception within the block, so that unfinished files are
    removed.
    """

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def check_no_overlap(target: Path, *sources: Path) -> None:
    """Raise :class:`UserError` when writing ``target``, or its temporary name, would replace one of
    the ``sources``.
    """
    for source in sources:
        resolved = source.resolve()
        for leftover in (target, temporary_name(target)):
            if leftover.resolve() in (resolved, *resolved.parents):
                raise UserError(
                    f"cannot write {leftover}: it holds the input {source}; choose another name"
                )


def temporary_name(out: Path) -> Path:
    """Return the name that a directory has while :func:`new_directory` writes it."""
    return out.with_name(out.name + ".tmp")


def check_free_space(out: Path, nbytes: int) -> None:
    """Raise :class:`UserError` when the file system of ``out`` has less than ``nbytes`` left."""
    parent = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise UserError(
            f"cannot write {out}: needs {nbytes / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB "
            "free"
        )


def allow_open_files() -> None:
    """Raise the limit of open files as far as this process may, for itself and its children. Every
    process group is connected to each of its ranks over gloo, and Slurm passes on the limit of the
    submitting shell (often 1,024).
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system that knows of no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
