"""The command line of bubblewrap: the namespaces and the read-only files that an untrusted program
sees.
"""

from __future__ import annotations

import json
import os
import sysconfig
from importlib import util
from pathlib import Path

PACKAGES = (
    "numpy",
    "numpy.libs",
    "sortedcontainers",
)  # besides the standard library, where installed


def command_line(bwrap: str, python: str, interpreter: list[str], role: str) -> list[str]:
    """Return bubblewrap's command line around ``interpreter``.

    pid 1 inside is bubblewrap itself, whose environment is readable: it gets an empty one. /proc is
    for the server of programs alone, which makes namespaces through it and hides it from them.
    """
    command = [
        os.path.realpath(bwrap),
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
    ]
    command += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox"]
    sources: dict[str, str] = {}

    def bind(source: str, target: str) -> None:
        word = source
        if os.geteuid() == 0 and not _reachable(source):
            word = f"@{len(sources)}"
            sources[word[1:]] = source
        command.extend(["--ro-bind", word, target])

    for name in ("/usr/lib", "/usr/lib64", "/usr/bin", "/lib", "/lib64", "/bin"):
        if os.path.islink(name):
            command.extend(["--symlink", os.readlink(name).lstrip("/"), name])
        elif os.path.isdir(name):
            bind(name, name)
    if os.path.exists("/etc/ld.so.cache"):
        bind("/etc/ld.so.cache", "/etc/ld.so.cache")
    for name in dict.fromkeys([python, stdlib(), *_extra_libraries()]):
        if not name.startswith(("/usr/lib/", "/usr/bin/")):
            bind(name, name)
    for name in (
        f"{stdlib()}/site-packages",
        f"{stdlib()}/dist-packages",
        "/usr/lib/python3/dist-packages",
    ):
        if os.path.isdir(
            name
        ):  # below what is bound: what else is installed is not the program's business
            command += ["--tmpfs", name, "--remount-ro", name]
    for name in PACKAGES:
        if os.path.isdir(f"{site_packages()}/{name}"):
            bind(f"{site_packages()}/{name}", f"/packages/{name}")
    command += ["--proc", "/proc"] if role == "program" else ["--dir", "/proc"]
    command += ["--dev", "/dev", "--remount-ro", "/dev", "--dir", "/tmp", "--chdir", "/"]
    command += ["--remount-ro", "/", *interpreter]
    if os.geteuid() != 0:
        return command
    launcher = (Path(__file__).parent / "guest" / "become_user.py").read_text(encoding="utf-8")
    return [
        python,
        "-I",
        "-S",
        "-c",
        launcher,
        json.dumps({"command": command, "sources": sources}),
    ]


def stdlib() -> str:
    return os.path.realpath(sysconfig.get_path("stdlib"))


def site_packages() -> str:
    """Return where NumPy is installed; programs see ``PACKAGES`` of it only."""
    spec = util.find_spec("numpy")
    if spec and spec.origin:
        return str(Path(spec.origin).parents[1])
    return sysconfig.get_path("purelib")


def _extra_libraries() -> list[str]:
    """Return Python's own shared library and its neighbors, when it lies outside the system's
    directories.
    """
    name = os.path.join(
        sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("LDLIBRARY") or "-"
    )
    if name.endswith(".so") and os.path.isfile(name):
        return [os.path.realpath(name)]
    return []


def _reachable(path: str) -> bool:
    """Return whether any user may walk to ``path``, and root's launcher, which mounts its own /tmp,
    does not cover it.
    """
    place = Path(os.path.realpath(path))
    return Path("/tmp") not in place.parents and all(
        os.stat(part).st_mode & 0o005 for part in [place, *place.parents]
    )
