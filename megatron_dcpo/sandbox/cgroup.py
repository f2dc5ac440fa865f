"""Control groups (version 2) around programs, if the kernel allows us to make them.

A program's group limits the memory and the number of all its processes together, with shared memory
counted once and without a moment of overshoot. It needs a directory below ``/sys/fs/cgroup`` which
this user may write and whose ``cgroup.subtree_control`` has ``memory`` and ``pids`` (or in which
they can be switched on): delegated by systemd (``Delegate=yes`` with ``DelegateSubgroup=``), by
Slurm's prolog, or root's own. ``DCPO_CGROUP`` names it; otherwise the group of this process and the
one above it are tried. If there is none, only the limits in ``local.py`` apply.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dcpo.errors import UserError

VARIABLE = "DCPO_CGROUP"
CONTROLLERS = ("memory", "pids")
_MOUNTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_REMOVAL_SECONDS = 2.0
_count = itertools.count()


@dataclass(frozen=True)
class Group:
    """A control group. A process that writes 0 to the open descriptor ``entry`` joins it, and so do
    the processes that it starts.
    """

    folder: Path | None
    entry: int | None

    def exceeded(self) -> bool:
        """Return whether the kernel has killed for want of memory in this group."""
        if self.folder is None:
            return False
        with contextlib.suppress(OSError):
            events = dict(
                line.split() for line in (self.folder / "memory.events").read_text().splitlines()
            )
            return int(events.get("oom_kill", 0)) > 0
        return False


class ControlGroups:
    """Makes the groups of one worker's programs in ``folder``, each with ``limits``, the texts of
    the group's files.
    """

    def __init__(self, limits: Mapping[str, str], folder: Path | None) -> None:
        self.limits = dict(limits)
        self.folder = folder

    @contextlib.contextmanager
    def group(self) -> Iterator[Group]:
        """Open a group for one program; at the end everything in it is killed and it is removed.
        Without a folder for groups it limits nothing.
        """
        if self.folder is None:
            yield Group(None, None)
            return
        folder = self.folder / f"dcpo-{os.getpid()}-{next(_count)}"
        folder.mkdir()
        try:
            for name, value in self.limits.items():
                if (folder / name).exists():  # a kernel without swap has no memory.swap.max
                    (folder / name).write_text(value)
            entry = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
            try:
                yield Group(folder, entry)
            finally:
                os.close(entry)
        finally:
            _remove(folder)


def limits_of(memory_bytes: int, processes: int) -> dict[str, str]:
    return {
        "memory.max": str(memory_bytes),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": str(processes),
    }


@functools.cache
def place() -> Path | None:
    """Return a folder in which groups with limits can be made, if there is one. Raises UserError if
    ``DCPO_CGROUP`` names a folder in which they cannot.
    """
    if named := os.environ.get(VARIABLE):
        if problem := _problem(Path(named)):
            raise UserError(f"{VARIABLE}={named}: {problem}")
        return Path(named)
    return next((folder for folder in _candidates() if not _problem(folder)), None)


def _candidates() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                for mount in _MOUNTS:
                    own = mount / line[3:].lstrip("/")
                    yield own
                    if own != mount:
                        yield own.parent


def _problem(folder: Path) -> str:
    """Return why no group with limits can be made in ``folder``, "" if one can."""
    try:
        enabled = (folder / "cgroup.subtree_control").read_text().split()
        if missing := [name for name in CONTROLLERS if name not in enabled]:
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in missing))
        _sweep(folder)
        with ControlGroups({}, folder).group() as group:
            assert group.folder is not None
            absent = [
                name for name in ("memory.max", "pids.max") if not (group.folder / name).exists()
            ]
            return f"its groups have no {absent[0]}" if absent else ""
    except OSError as error:
        return f"{error.strerror} ({error.filename})"


def _sweep(folder: Path) -> None:
    """Remove what a killed judge has left."""
    for left in folder.glob("dcpo-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            _remove(left)


def _remove(folder: Path) -> None:
    """Kill everything in the group; it goes once its processes are reaped."""
    deadline = time.monotonic() + _REMOVAL_SECONDS
    with contextlib.suppress(OSError), open(folder / "cgroup.kill", "r+") as stream:
        stream.write("1")
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return  # swept by the next judge
            time.sleep(0.005)
