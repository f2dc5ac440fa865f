"""Root's way into bubblewrap: become an ordinary user first, for whom process limits hold, and keep
Python reachable.

Run as a script with a JSON argument ``{"command": [...], "sources": {number: path}}``: directories
that another user could not reach are mounted below /tmp in a mount namespace of this process alone,
and ``@number`` in the command becomes that place. Ends by executing the command.
"""

import ctypes
import json
import os
import stat
import sys

_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: str, kind: str, flags: int) -> None:
    if (
        _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
        < 0
    ):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def main(order: dict) -> None:
    """Become the user and run the command; does not return."""
    if _libc.unshare(0x20000) < 0:
        raise OSError(ctypes.get_errno(), "unshare")
    _mount(source="none", target="/", kind="", flags=0x4000 | 0x40000)
    kept = {}
    descriptors = {number: os.open(path, os.O_PATH) for number, path in order["sources"].items()}
    _mount(source="tmpfs", target="/tmp", kind="tmpfs", flags=0)
    os.chmod("/tmp", 0o755)
    for number, descriptor in descriptors.items():
        kept[f"@{number}"] = target = f"/tmp/{number}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.mkdir(target)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(source=f"/proc/self/fd/{descriptor}", target=target, kind="", flags=0x1000 | 0x4000)
        os.close(descriptor)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    command = [kept.get(word, word) for word in order["command"]]
    os.execve(command[0], command, {"PATH": "/usr/bin:/bin"})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
