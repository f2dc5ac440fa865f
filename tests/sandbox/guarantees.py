"""What a sandboxed process reaches of its host. ``python -m tests.sandbox.guarantees LEVEL``
prints, as whoever runs it, ``{"program": [what a program could do], "checker": [what the tests of a
program could do]}``.

Everything tried is within reach of the user who runs it, and works without a sandbox (level
``unsafe``).
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.program_judge import SandboxSession
from megatron_dcpo.sandbox.tests import checked_tests

# name: an expression that is true when it succeeded. The rows of the table in docs/programs.md
# group them.
ATTEMPTS = {
    "read_file": "'secret' in open(FILE).read()",
    "list_folder": "bool(os.listdir(FOLDER))",
    "append": "open(FILE, 'a').write('x')",
    "create": "open(FOLDER + '/new', 'w').write('x')",
    "make_folder": "os.mkdir(FOLDER + '/folder') is None",
    "rename": "os.rename(FILE + '2', FILE + '3') is None",
    "remove": "os.remove(FILE + '4') is None",
    "link": "os.link(FILE, FOLDER + '/link') is None",
    "symlink": "os.symlink(FILE, FOLDER + '/symlink') is None",
    "chmod": "os.chmod(FILE, 0o644) is None",
    "chmod_folder": "os.chmod(FOLDER, 0o755) is None",
    "chown": "os.chown(FILE, -1, os.getgid()) is None",
    "utime": "os.utime(FILE, (1, 1)) is None",
    "setxattr": "os.setxattr(FILE, 'user.evil', b'x') is None",
    "truncate": "os.truncate(FILE, 1) is None",
    "truncate_by_reading": "os.open(FILE, os.O_RDONLY | os.O_TRUNC) > 0",
    "watch_names": "libc.inotify_add_watch(libc.inotify_init(), FOLDER.encode(), 0xFFF) > 0",
    "tcp": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "unix": "socket.socket(socket.AF_UNIX).connect(FOLDER + '/stream') is None",
    "abstract": "socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT) is None",
    "datagram_of_a_pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', "
    "FOLDER + '/datagram')",
    "datagram_of_a_stream": "socket.socketpair()[0].sendmsg([b'x'], [], 0, FOLDER + '/datagram')",
    "shared_segment": "libc.shmat(SEGMENT, None, 0) not in (-1, 0xFFFFFFFFFFFFFFFF)",
    "new_segment": "libc.shmget(0, 4096, 0o1600) >= 0",
    "new_semaphore": "libc.semget(0, 1, 0o1600) >= 0",
    "new_queue": "libc.msgget(0, 0o1600) >= 0",
    "signal": "os.kill(VICTIM, 0) is None",
    "queued_signal": "libc.sigqueue(VICTIM, 0, None) == 0",
    "signal_by_descriptor": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), 0) is None",
    "limits": "resource.prlimit(VICTIM, resource.RLIMIT_CORE)",
    "priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19) is None",
    "cores": "os.sched_setaffinity(VICTIM, os.sched_getaffinity(0)) is None",
    "environment": "b'PATH' in open(f'/proc/{VICTIM}/environ', 'rb').read()",
    "memory": "open(f'/proc/{VICTIM}/mem', 'rb').fileno() >= 0",
    "fork": "os.fork() == 0 and os._exit(0) or True",
    "outlive": "libc.prctl(1, 0) == 0",
    "mounts": "bool(open('/proc/self/mountinfo').read())",
    "oom_score": "open('/proc/self/oom_score_adj', 'w').write('1000')",
    "core_dump": "resource.getrlimit(resource.RLIMIT_CORE)[1] != 1",
    "namespace": "libc.unshare(0x10000000) == 0",
    "memory_file": "os.memfd_create('x') >= 0",
    "io_uring": "libc.syscall(425, 4, (ctypes.c_char * 256)()) >= 0",
    "event_counter": "libc.syscall(298, (ctypes.c_char * 128)(112), 0, -1, -1, 0) >= 0",
}
_PROBE = """
import ctypes, os, resource, signal, socket
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_size_t
done = []
for name, attempt in ATTEMPTS.items():
    try:
        if eval(attempt): done.append(name)
    except Exception: pass
"""


def reached(level: str) -> dict[str, list[str]]:
    """The names of ``ATTEMPTS`` that succeed, for a program and for the tests of one."""
    return {"program": _attempts(level, False), "checker": _attempts(level, True)}


def _attempts(level: str, as_tests: bool) -> list[str]:
    root = os.geteuid() == 0
    libc = ctypes.CDLL(None)
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        SandboxSession(level, CodeLimits()) as session,
    ):  # type: ignore[arg-type]
        os.chmod(folder, 0o777 if root else 0o700)
        for name in ("file", "file2", "file4"):
            Path(folder, name).write_text("secret")
            os.chmod(Path(folder, name), 0o666 if root else 0o600)
            if root:  # the user that sandboxes become
                os.chown(Path(folder, name), 65534, 65534)
        if root:
            os.chown(folder, 65534, 65534)
        listeners = {name: socket.socket(family, kind) for name, family, kind in _SOCKETS}
        port_holder = listeners["tcp"]
        port_holder.bind(("127.0.0.1", 0))
        listeners["stream"].bind(f"{folder}/stream")
        listeners["datagram"].bind(f"{folder}/datagram")
        abstract = f"dcpo-{os.urandom(8).hex()}"
        listeners["abstract"].bind("\0" + abstract)
        for name, listener in listeners.items():
            if name != "datagram":
                listener.listen()
        for name in ("stream", "datagram"):
            os.chmod(f"{folder}/{name}", 0o777)
        segment = libc.shmget(0, 4096, 0o1666)
        account: dict[str, Any] = (
            {"user": 65534, "group": 65534, "extra_groups": []} if root else {}
        )
        victim = subprocess.Popen(["sleep", "600"], env={"PATH": "/usr/bin:/bin"}, **account)
        values = {
            "FILE": f"{folder}/file",
            "FOLDER": folder,
            "PORT": port_holder.getsockname()[1],
            "ABSTRACT": abstract,
            "SEGMENT": segment,
            "VICTIM": victim.pid,
            "ATTEMPTS": ATTEMPTS,
        }
        probe = "\n".join(f"{name} = {value!r}" for name, value in values.items()) + _PROBE
        try:
            program, code = probe + "def f(): return done", "done = candidate()"
            if as_tests:
                program, code = (
                    "def f(): return 1",
                    f"candidate(); names = {{}}; exec({probe!r}, names); done = names['done']",
                )
            code = f"def check(candidate):\n    {code}\n    raise AssertionError(' '.join(done))"
            verdict = session.judge(
                program, checked_tests({"kind": "check", "entry_point": "f", "code": code})
            )
            assert verdict.detail.startswith("AssertionError"), verdict
            return verdict.detail.partition(":")[2].split()
        finally:
            victim.kill()
            victim.wait()
            libc.shmctl(segment, 0, None)
            for listener in listeners.values():
                listener.close()


_SOCKETS = (
    ("tcp", socket.AF_INET, socket.SOCK_STREAM),
    ("stream", socket.AF_UNIX, socket.SOCK_STREAM),
    ("datagram", socket.AF_UNIX, socket.SOCK_DGRAM),
    ("abstract", socket.AF_UNIX, socket.SOCK_STREAM),
)

if __name__ == "__main__":
    print(json.dumps(reached(sys.argv[1])))
