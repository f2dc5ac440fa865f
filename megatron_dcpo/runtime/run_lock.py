"""One training per run directory: two at once would mix their records and overwrite each other's
checkpoints.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.distributed import broadcast_object

PATIENCE_SECONDS = 15.0  # a killed job's processes may be a little behind the job that continues it


@contextmanager
def lock_run_dir(directory: Path, rank: int) -> Iterator[None]:
    """Hold ``directory`` for this training, until the block or the process ends. Collective; rank 0
    has the lock.

    Raises :class:`UserError` on every rank when another training holds it, or when it cannot be
    written. On a file system without locks nothing is checked.
    """
    descriptor = None
    refused = None
    if rank == 0:
        try:
            descriptor = _lock(directory / "lock")
        except UserError as error:
            refused = str(error)
        except OSError as error:
            reason = error.strerror or error
            refused = (
                f"cannot write in run_dir {directory} ({reason}); free space or change run_dir"
            )
    if (refused := broadcast_object(refused)) is not None:
        raise UserError(refused)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path) -> int:
    """Return the descriptor that holds the lock. As a POSIX lock it ends with this process, even if
    children of it survive.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return descriptor  # no locks here
            if time.monotonic() > until:
                holder = os.read(descriptor, 200).decode(errors="replace").strip()
                os.close(descriptor)
                raise UserError(
                    f"another training is running in {path.parent} ({holder}); stop it first, or "
                    "choose another run_dir"
                ) from None
        time.sleep(0.5)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor
