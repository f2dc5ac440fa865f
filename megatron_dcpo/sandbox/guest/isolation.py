"""Confinement by system call: namespaces, capabilities, Landlock and resource limits, through
ctypes.

Every function raises OSError if the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x20000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_ENOSYS = 38


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, pointer: object = None) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when ``parent``, which has just forked it, ends. It may have
    ended already.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def set_dumpable(yes: bool) -> None:
    """Set whether this process is dumpable. Its user can neither trace a process that is not, nor
    read it through /proc.
    """
    prctl(_PR_SET_DUMPABLE, int(yes))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def map_own_user() -> None:
    """Map the user that made a new user namespace as its only user, with a number other than 0."""
    user = os.getuid()
    group = os.getgid()
    unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"65534 {user} 1"),
        ("gid_map", f"65534 {group} 1"),
    ):
        pipe = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(pipe, text.encode())
        finally:
            os.close(pipe)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind)]
    _check(
        _libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}"
    )


def private_mounts(scratch_bytes: int) -> int:
    """Mount an empty /tmp of limited size and an empty /proc. Return the real /proc of this
    namespace as an open directory, because only the supervisor may read about mounts and processes.
    """
    mount(source="none", target="/", kind="", flags=_MS_REC | _MS_PRIVATE)
    mount(
        source="tmpfs",
        target="/tmp",
        kind="tmpfs",
        flags=_MS_NOSUID | _MS_NODEV,
        options=f"size={scratch_bytes},nr_inodes=4096,mode=1777",
    )
    mount(source="proc", target="/proc", kind="proc", flags=_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    mount(
        source="tmpfs",
        target="/proc",
        kind="tmpfs",
        flags=_MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_RDONLY,
        options="nr_inodes=1,mode=555",
    )
    return processes


def drop_capabilities() -> None:
    """Drop all capabilities from all sets, for good."""
    for number in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) < 0:
            break
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)), "capset")


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit, never above what is allowed already."""
    allowed = resource.getrlimit(kind)[1]
    top = soft if hard is None else hard
    if allowed != resource.RLIM_INFINITY:
        top = min(top, allowed)
    resource.setrlimit(kind, (min(soft, top), top))


# ----------------------------------------------------------------------------------------- Landlock
ABI_OF_TRUNCATE = 3  # the first that knows truncation
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_WRITE_FILE = 1 << 1
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


def landlock_abi() -> int:
    """Return the kernel's Landlock version, 0 without Landlock."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock(readable: Iterable[int], listable: Iterable[int], usable: Iterable[str] = ()) -> None:
    """Allow reading below the directories ``readable`` (descriptors), listing ``listable``, and the
    devices ``usable``.

    Everything else in the file system is refused: writing anywhere, other files, the /proc of other
    processes. TCP, abstract sockets and signals to the outside are refused as well if the kernel's
    Landlock knows them.
    """
    abi = landlock_abi()
    if not abi:
        raise OSError(_ENOSYS, "the kernel has no Landlock")
    rights = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0
    scope = 3 if abi >= 6 else 0
    attributes = struct.pack("=QQQ", rights, network, scope)[
        : 24 if abi >= 6 else 16 if abi >= 4 else 8
    ]
    rules = _check(
        _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0),
        "landlock_create_ruleset",
    )
    try:
        for directory in readable:
            _allow(rules, directory, _READ_FILE | _READ_DIR)
        for directory in listable:
            _allow(rules, directory, _READ_DIR)
        for name in usable:
            device = os.open(name, os.O_PATH)
            try:
                _allow(rules, device, _READ_FILE | _WRITE_FILE)
            finally:
                os.close(device)
        _check(_libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _allow(rules: int, descriptor: int, rights: int) -> None:
    rule = struct.pack("=Qi", rights, descriptor)
    _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), "landlock_add_rule")
