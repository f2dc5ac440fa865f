"""UserError, Stopped, and the exit statuses of a process."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Exit statuses of every verb besides 0 and Python's own 1 for an unforeseen exception.
EXIT_USER_ERROR = 2
EXIT_PEER_LOST = 98  # another process of the job died or hung: start the job again with --resume auto
EXIT_REQUEUE = 99  # stopped by SIGTERM or SIGUSR1 and saved: Slurm's RequeueExit
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """Bad input: one clear line naming the thing and the fix. The command line prints it and exits with status 2."""


class Stopped(Exception):
    """A signal asked the run to end; what is done is saved. ``exit_status``: that of the process."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.4) -> str | None:
    """The one of ``known`` that is most like ``word``; None when none is at least ``cutoff`` (0 to 1) like it."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)
