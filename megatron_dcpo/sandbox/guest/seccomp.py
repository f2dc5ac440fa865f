"""The system calls that a program may make, as an allow list: a call that a later kernel adds is
refused.

Linux on x86-64 and aarch64. A call that is not in the list fails with EPERM; one with a number of
the kernel's new, common range (from ``_COMMON`` on) fails with ENOSYS, at which the C library falls
back to an older call (``clone3`` to ``clone``).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
from collections.abc import Sequence

from megatron_dcpo.sandbox.guest.isolation import prctl

# name:number on x86-64:number on aarch64 (-1: there is none)
_EVERYWHERE = """
read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69
pwritev:296:70 preadv2:327:286 pwritev2:328:287 lseek:8:62 close:3:57 stat:4:-1
fstat:5:80 lstat:6:-1 newfstatat:262:79 statx:332:291 access:21:-1 faccessat:269:48
faccessat2:439:439 readlink:89:-1 readlinkat:267:78 getdents:78:-1 getdents64:217:61 getcwd:79:17
chdir:80:49 fchdir:81:50 fsync:74:82 fdatasync:75:83 ftruncate:77:46 fadvise64:221:223 dup:32:23
dup2:33:-1 dup3:292:24 pipe:22:-1 pipe2:293:59 sendfile:40:71 copy_file_range:326:285 splice:275:76
tee:276:77 statfs:137:43 fstatfs:138:44 umask:95:166 poll:7:-1 ppoll:271:73 select:23:-1
pselect6:270:72 epoll_create:213:-1 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-1
epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:-1 eventfd2:290:19 timerfd_create:283:85
timerfd_settime:286:86 timerfd_gettime:287:87 signalfd:282:-1 signalfd4:289:74 nanosleep:35:101
clock_nanosleep:230:115 pause:34:-1 restart_syscall:219:128 futex:202:98 futex_waitv:449:449
futex_wake:454:454 futex_wait:455:455 futex_requeue:456:456 sched_yield:24:124 wait4:61:260
waitid:247:95 mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233 brk:12:214
msync:26:227 mincore:27:232 membarrier:324:283 get_mempolicy:239:236 map_shadow_stack:453:453
exit:60:93 exit_group:231:94 getpid:39:172 getppid:110:173 gettid:186:178 getpgid:121:155
getpgrp:111:-1 getsid:124:156 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getresuid:118:148 getresgid:120:150 getgroups:115:158 getrusage:98:165 getrlimit:97:163
setrlimit:160:164 times:100:153 sysinfo:99:179 uname:63:160 getcpu:309:168 getpriority:140:141
capget:125:90 arch_prctl:158:-1 set_tid_address:218:96 set_robust_list:273:99
get_robust_list:274:100 rseq:334:293 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_getattr:315:275 sched_get_priority_max:146:125
sched_get_priority_min:147:126 sched_rr_get_interval:148:127 time:201:-1 gettimeofday:96:169
clock_gettime:228:113 clock_getres:229:114 getitimer:36:102 setitimer:38:103 alarm:37:-1
timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_getoverrun:225:109
timer_delete:226:111 getrandom:318:278 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigtimedwait:128:137 rt_sigsuspend:130:133 sigaltstack:131:132
recvfrom:45:207 recvmsg:47:212 shutdown:48:210 getsockopt:55:209 getsockname:51:204
getpeername:52:205
"""
# For a program that has its own namespaces: processes, signals to them, and files in its /tmp.
_IN_NAMESPACES = """
fork:57:-1 vfork:58:-1 execve:59:221 execveat:322:281 kill:62:129 tkill:200:130
tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240 pidfd_open:434:434
pidfd_send_signal:424:424 setsid:112:157 setpgid:109:154 open:2:-1 openat:257:56
creat:85:-1 flock:73:32 chmod:90:-1 fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utime:132:-1
utimes:235:-1 utimensat:280:88 futimesat:261:-1 rename:82:-1 renameat:264:38 renameat2:316:276
mkdir:83:-1 mkdirat:258:34 rmdir:84:-1 unlink:87:-1 unlinkat:263:35 link:86:-1 linkat:265:37
symlink:88:-1 symlinkat:266:36 truncate:76:45 mknod:133:-1 mknodat:259:33 fallocate:285:47
getxattr:191:8 lgetxattr:192:9 fgetxattr:193:10 listxattr:194:11 llistxattr:195:12 flistxattr:196:13
"""
# Decided by an argument, below.
_DECIDED = """
clone:56:220 kill:62:129 tgkill:234:131 prlimit64:302:261 open:2:-1 openat:257:56 fcntl:72:25
ioctl:16:29 prctl:157:167 socketpair:53:199 sendto:44:206 close_range:436:436
"""
_COMMON = 424
_CLONE_FILES = 0x400
_CLONE_THREAD = 0x10000
_CLONE_NEW_ANY = 0x7E020080
# F_DUPFD to F_SETLKW, locks of open files, F_DUPFD_CLOEXEC, the size of a pipe, F_GET_SEALS. Not
# the owner of a file (F_SETOWN, F_SETSIG): it sends signals.
_FILE_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1034)
# TCGETS (isatty), TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Not TIOCSTI: it
# types into a terminal.
_DEVICE_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ, PR_SET_NO_NEW_PRIVS and its question, PR_SET_VMA. Not
# the signal at a parent's death, which ends the process.
_PROCESS_OPTIONS = (15, 16, 23, 38, 39, 0x53564D41)
_UNIX = 1
# SOCK_STREAM, perhaps non-blocking, perhaps closed by exec
_STREAMS = (1, 0x801, 0x80001, 0x80801)
# none, CLOSE_RANGE_CLOEXEC. Not CLOSE_RANGE_UNSHARE: a thread that has descriptors of its own has
# as many as a process.
_CLOSINGS = (0, 4)
_O_TRUNC = 0x200
_EPERM = 1
_ENOTTY = 25
_ENOSYS = 38

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_REFUSE = 0x00050000
_LOAD = 0x20
_JUMP = 0x05
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06

Instruction = tuple[int, int, int, int]
_ALLOWED: Instruction = (_RETURN, 0, 0, _ALLOW)


def supported() -> bool:
    """Return whether the numbers of this processor's system calls are known."""
    return platform.machine() in _MACHINES


def confine(alone: bool, truncates: bool = True) -> None:
    """Install the filter for good. Raises OSError if the kernel refuses.

    A process sets no limits but its own, not those of its supervisor either, and all its threads
    share its descriptors. ``alone`` is for a process that shares its user with processes outside:
    it starts no other process and signals none. Without ``truncates``, opening a file with O_TRUNC
    is refused as well, because that empties even a file that is opened for reading; kernels whose
    Landlock does not know truncation need this.
    """
    column, machine = _MACHINES[platform.machine()]
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, 0),
    ]
    if column == 0:  # x86-64 has a second numbering of the calls
        program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL_PROCESS)]
    if alone:
        for name in ("kill", "tgkill"):
            program += _decided(name, _if_one_of(0, (os.getpid(),)))
    _install(_packed(program) + common_part(alone, truncates))


@functools.cache
def common_part(alone: bool, truncates: bool = True) -> bytes:
    """Return the filter without the part that names this process. The server makes it once, before
    it forks.
    """
    program = []
    for name, rule in _rules(alone, truncates).items():
        program += _decided(name, rule)
    column, _ = _MACHINES[platform.machine()]
    allowed = set(_numbers(_EVERYWHERE, column).values())
    if not alone:
        allowed |= set(_numbers(_IN_NAMESPACES, column).values())
    elif truncates:
        decided = _numbers(_DECIDED, column)
        allowed |= {decided["open"], decided["openat"]}
    verdicts = []
    for number in range(max(allowed) + 2):
        if number in allowed:
            verdicts.append(_ALLOWED)
        elif number < _COMMON:
            verdicts.append(_refuse(_EPERM))
        else:
            verdicts.append(_refuse(_ENOSYS))
    return _packed([*program, *_search(verdicts)])


def _search(verdicts: Sequence[Instruction], start: int = 0) -> list[Instruction]:
    """Return a binary search for the verdict on each number from ``start`` on; the last verdict is
    also that on all larger numbers. The kernel tries every number when the filter is installed.
    """
    changes = []
    for index in range(1, len(verdicts)):
        if verdicts[index] != verdicts[index - 1]:
            changes.append(index)
    if not changes:
        return [verdicts[0]]
    middle = changes[len(changes) // 2]
    below = _search(verdicts[:middle], start)
    above = _search(verdicts[middle:], start + middle)
    if len(below) < 256:  # the longest distance of a conditional jump
        return [(_AT_LEAST, len(below), 0, start + middle), *below, *above]
    return [(_AT_LEAST, 0, 1, start + middle), (_JUMP, 0, 0, len(below)), *below, *above]


def _decided(name: str, rule: list[Instruction]) -> list[Instruction]:
    """Return ``rule``, which ends in a verdict, for a single call."""
    column, _ = _MACHINES[platform.machine()]
    number = _numbers(_DECIDED, column)[name]
    if number < 0:
        return []
    return [(_EQUAL, 0, len(rule), number), *rule]


def _rules(alone: bool, truncates: bool) -> dict[str, list[Instruction]]:
    """Return the rules that decide on a call by its arguments; each ends in a verdict."""
    commands = []
    for command in range(1036):
        commands.append(_ALLOWED if command in _FILE_COMMANDS else _refuse())
    new_task = [
        _argument(0),
        (_ANY_BIT, 0, 1, _CLONE_NEW_ANY),
        _refuse(),
        (_ANY_BIT, 0, 2, _CLONE_THREAD),
        (_ANY_BIT, 1, 0, _CLONE_FILES),
        _refuse(),
    ]
    without_address = _if_one_of(4, (0,), high=True)
    rules = {
        "fcntl": [_argument(1), *_search(commands)],
        "ioctl": _if_one_of(1, _DEVICE_REQUESTS, _refuse(_ENOTTY)),
        "prctl": _if_one_of(0, _PROCESS_OPTIONS),
        "socketpair": [_argument(0), (_EQUAL, 1, 0, _UNIX), _refuse(), *_if_one_of(1, _STREAMS)],
        "sendto": [_argument(4), (_EQUAL, 1, 0, 0), _refuse(), *without_address],
        "clone": [*new_task, _ALLOWED],
        "close_range": _if_one_of(2, _CLOSINGS),
        "prlimit64": _if_one_of(0, (0,)),  # the process that asks
    }
    if not alone:
        return rules
    only_threads = [(_ANY_BIT, 1, 0, _CLONE_THREAD), _refuse(), _ALLOWED]
    rules["clone"] = [*new_task, *only_threads]
    if not truncates:
        for name, flags in (("open", 1), ("openat", 2)):
            rules[name] = [_argument(flags), (_ANY_BIT, 0, 1, _O_TRUNC), _refuse(), _ALLOWED]
    return rules


@functools.cache
def _numbers(table: str, column: int) -> dict[str, int]:
    numbers = {}
    for word in table.split():
        name, *of_machines = word.split(":")
        numbers[name] = int(of_machines[column])
    return numbers


def _argument(number: int, high: bool = False) -> Instruction:
    """Return the instruction that loads a word of an argument; both processors are
    little-endian.
    """
    return _LOAD, 0, 0, 16 + 8 * number + 4 * high


def _refuse(error: int = _EPERM) -> Instruction:
    return _RETURN, 0, 0, _REFUSE | error


def _if_one_of(
    argument: int, values: Sequence[int], otherwise: Instruction | None = None, high: bool = False
) -> list[Instruction]:
    """Return the rule that allows a call if its argument is one of ``values``."""
    tests = []
    for index, value in enumerate(values):
        tests.append((_EQUAL, len(values) - index, 0, value))
    return [_argument(argument, high), *tests, otherwise or _refuse(), _ALLOWED]


def _packed(program: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _install(code: bytes) -> None:
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    prctl(22, 2, ctypes.create_string_buffer(header, len(header)))
