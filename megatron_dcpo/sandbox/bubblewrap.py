"""The command line of bubblewrap: the namespaces and the read-only files that an untrusted program
sees.
"""

from __future__ import annotations

import json
import os
import sysconfig
from importlib import util
from pathlib import Path

# The packages that programs see in addition to the standard library, if they are installed.
PACKAGES = ("numpy", "numpy.libs", "sortedcontainers")
_SYSTEM_DIRECTORIES = ("/usr/lib", "/usr/lib64", "/usr/bin", "/lib", "/lib64", "/bin")


def command_line(bwrap: str, python: str, interpreter: list[str], role: str) -> list[str]:
    """Return bubblewrap's command line around ``interpreter``.

    Process 1 inside is bubblewrap itself, whose environment can be read: it gets an empty one. Only
    the server of programs has /proc, through which it makes namespaces, and hides it from them.
    """
    files = _Files()
    files.bind_system()
    files.bind_python(python)
    if role == "program":
        proc = ["--proc", "/proc"]
    else:
        proc = ["--dir", "/proc"]
    command = [
        os.path.realpath(bwrap),
        *["--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"],
        *["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox"],
        *files.options,
        *proc,
        *["--dev", "/dev", "--remount-ro", "/dev", "--dir", "/tmp", "--chdir", "/"],
        *["--remount-ro", "/"],
        *interpreter,
    ]
    if os.geteuid() != 0:
        return command
    launcher = (Path(__file__).parent / "guest" / "become_user.py").read_text(encoding="utf-8")
    instructions = json.dumps({"command": command, "sources": files.sources})
    return [python, "-I", "-S", "-c", launcher, instructions]


class _Files:
    """The read-only files inside. ``options`` are bubblewrap's; ``sources`` are the paths that
    root's launcher has to open for the user, by the number that stands in for them.
    """

    def __init__(self) -> None:
        self.options: list[str] = []
        self.sources: dict[str, str] = {}

    def bind(self, source: str, target: str) -> None:
        word = source
        if os.geteuid() == 0 and not _reachable(source):
            number = str(len(self.sources))
            self.sources[number] = source
            word = f"@{number}"
        self.options += ["--ro-bind", word, target]

    def bind_system(self) -> None:
        for name in _SYSTEM_DIRECTORIES:
            if os.path.islink(name):
                self.options += ["--symlink", os.readlink(name).lstrip("/"), name]
            elif os.path.isdir(name):
                self.bind(name, name)
        if os.path.exists("/etc/ld.so.cache"):
            self.bind("/etc/ld.so.cache", "/etc/ld.so.cache")

    def bind_python(self, python: str) -> None:
        """Bind the interpreter with its standard library, and of all installed packages only
        :data:`PACKAGES`.
        """
        for name in dict.fromkeys([python, stdlib(), *_extra_libraries()]):
            if not name.startswith(("/usr/lib/", "/usr/bin/")):
                self.bind(name, name)
        hidden = [
            f"{stdlib()}/site-packages",
            f"{stdlib()}/dist-packages",
            "/usr/lib/python3/dist-packages",
        ]
        for name in hidden:
            if os.path.isdir(name):
                self.options += ["--tmpfs", name, "--remount-ro", name]
        for name in PACKAGES:
            if os.path.isdir(f"{site_packages()}/{name}"):
                self.bind(f"{site_packages()}/{name}", f"/packages/{name}")


def stdlib() -> str:
    return os.path.realpath(sysconfig.get_path("stdlib"))


def site_packages() -> str:
    """Return the directory in which NumPy is installed; programs see only ``PACKAGES`` in it."""
    spec = util.find_spec("numpy")
    if spec and spec.origin:
        return str(Path(spec.origin).parents[1])
    return sysconfig.get_path("purelib")


def _extra_libraries() -> list[str]:
    """Return Python's shared library if it is outside the system's directories."""
    directory = sysconfig.get_config_var("LIBDIR") or ""
    name = os.path.join(directory, sysconfig.get_config_var("LDLIBRARY") or "-")
    if name.endswith(".so") and os.path.isfile(name):
        return [os.path.realpath(name)]
    return []


def _reachable(path: str) -> bool:
    """Return whether any user may walk to ``path``, and it is not covered by the /tmp that root's
    launcher mounts.
    """
    real = Path(os.path.realpath(path))
    if Path("/tmp") in real.parents:
        return False
    return all(os.stat(part).st_mode & 0o005 for part in [real, *real.parents])
