"""Confinement by system call: namespaces, capabilities, seccomp, Landlock and resource limits, through ctypes.

Linux on x86-64 and aarch64. Every function raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x08000000, 0x10000000, 0x20000000
_CLONE_THREAD, _CLONE_NEW_ANY = 0x10000, 0x7E020080
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
_EPERM, _ENOSYS = 1, 38


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, pointer: object = None) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0), f"prctl {option}")


def die_with_parent() -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_dumpable(yes: bool) -> None:
    """A process that is not dumpable can be neither traced nor read through /proc by its own user."""
    prctl(_PR_SET_DUMPABLE, int(yes))


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def map_own_user() -> None:
    """The only user of a fresh user namespace is the one that made it, under a number that is not 0."""
    user, group = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC)
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        pipe = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(pipe, text.encode())
        finally:
            os.close(pipe)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = [text.encode() for text in (source, target, kind)]
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def private_mounts(scratch_bytes: int) -> None:
    """An empty /tmp of limited size and a /proc that shows this namespace's processes only."""
    mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={scratch_bytes},nr_inodes=4096,mode=1777")
    mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def drop_capabilities() -> None:
    """None in any set, and none to be had again."""
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


# ---------------------------------------------------------------------------------------------------------- seccomp
# Numbers on x86-64 and aarch64 (-1: the call does not exist there).
_CALLS: dict[str, tuple[int, int]] = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "io_setup": (206, 0), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "syslog": (103, 116), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "personality": (135, 92), "vhangup": (153, 58),
    "setpriority": (141, 140), "sched_setaffinity": (203, 122), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "ioprio_set": (251, 30),
    "seccomp": (317, 277),
}  # fmt: skip
_ALONE_CALLS: dict[str, tuple[int, int]] = {  # where other processes can be seen, also these
    "fork": (57, -1), "vfork": (58, -1), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
}  # fmt: skip
_CLONE, _CLONE3 = (56, 220), (435, 435)
_KILL, _TGKILL, _PRLIMIT, _FCNTL, _IOCTL = (62, 129), (234, 131), (302, 261), (72, 25), (16, 29)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW, _KILL_PROCESS, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

Instruction = tuple[int, int, int, int]


def seccomp_supported() -> bool:
    return platform.machine() in _MACHINES


def seccomp(alone: bool) -> None:
    """Refuse (EPERM) sockets, tracing, namespaces, mounts, keys, shared memory and what administers a machine.

    ``alone``: also new processes, and everything that reaches another process: signals to others, their limits, and
    signals by way of a file's owner. For a program that shares its user with processes outside.
    """
    place, machine = _MACHINES[platform.machine()]
    program: list[Instruction] = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL_PROCESS)]
    program.append((_LOAD, 0, 0, 0))
    if place == 0:  # the other numbering of the same processor
        program += [(_JUMP_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL_PROCESS)]
    refused = {**_CALLS, **(_ALONE_CALLS if alone else {})}
    for numbers in refused.values():
        if numbers[place] >= 0:
            program += _refuse(numbers[place])
    program += _refuse(_CLONE3[place], error=_ENOSYS)  # its flags cannot be seen here; callers fall back to clone
    program += _refuse_if(_CLONE[place], 0, [(_JUMP_ANY_BIT, _CLONE_NEW_ANY, True)])
    if alone:
        pid = os.getpid()
        program += _refuse_if(_CLONE[place], 0, [(_JUMP_ANY_BIT, _CLONE_THREAD, False)])
        program += _refuse_if(_KILL[place], 0, [(_JUMP_EQUAL, pid, False)])
        program += _refuse_if(_TGKILL[place], 0, [(_JUMP_EQUAL, pid, False)])
        program += _refuse_if(_PRLIMIT[place], 0, [(_JUMP_EQUAL, 0, False)])
        for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
            program += _refuse_if(_FCNTL[place], 1, [(_JUMP_EQUAL, command, True)])
        for request in (0x8901, 0x8902):  # FIOSETOWN, SIOCSPGRP
            program += _refuse_if(_IOCTL[place], 1, [(_JUMP_EQUAL, request, True)])
    # TIOCSTI and TIOCLINUX would type into a terminal.
    for request in (0x5412, 0x541C):
        program += _refuse_if(_IOCTL[place], 1, [(_JUMP_EQUAL, request, True)])
    program.append((_RETURN, 0, 0, _ALLOW))
    _install(program)


def _refuse(number: int, error: int = _EPERM) -> list[Instruction]:
    return [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE | error)]


def _refuse_if(number: int, argument: int, tests: Sequence[tuple[int, int, bool]]) -> list[Instruction]:
    """Refuse ``number`` when a test of the argument's low word comes out as wanted. Restores the number afterwards."""
    body: list[Instruction] = [(_LOAD, 0, 0, 16 + 8 * argument)]
    for operation, value, refused_if in tests:
        body.append((operation, 0, 1, value) if refused_if else (operation, 1, 0, value))
        body.append((_RETURN, 0, 0, _REFUSE | _EPERM))
    body.append((_LOAD, 0, 0, 0))
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _install(program: Sequence[Instruction]) -> None:
    code = b"".join(struct.pack("=HBBI", op, yes, no, value) for op, yes, no, value in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    prctl(_PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header, len(header)))


# --------------------------------------------------------------------------------------------------------- Landlock
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}


def landlock_abi() -> int:
    """The kernel's Landlock version, 0 without Landlock."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def landlock(readable: Iterable[int], listable: Iterable[int], usable: Iterable[str] = ()) -> None:
    """Allow reading below the directories ``readable`` (descriptors), listing ``listable``, and the devices ``usable``.

    Everything else of the file system is refused: writing anywhere, other files, other processes' /proc. TCP, abstract
    sockets and signals to the outside are refused as well where the kernel's Landlock knows them.
    """
    abi = landlock_abi()
    if not abi:
        raise OSError(_ENOSYS, "the kernel has no Landlock")
    rights = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    network = 3 if abi >= 4 else 0
    scope = 3 if abi >= 6 else 0
    attributes = struct.pack("=QQQ", rights, network, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = _check(
        _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset"
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


def _allow(rules: int, place: int, rights: int) -> None:
    rule = struct.pack("=Qi", rights, place)
    _check(_libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), "landlock_add_rule")
