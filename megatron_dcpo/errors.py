"""The error that is the user's to mend, the stop that is nobody's fault, and what a process's exit status says."""

from __future__ import annotations

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
