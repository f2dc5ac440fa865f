"""Two nodes on one machine: network namespaces joined by a veth pair, each with a host name of its
own. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

LINK = "eth0"  # the same name on both: one GLOO_SOCKET_IFNAME for all


@dataclass(frozen=True)
class Node:
    """``name``: host name; ``namespace``: of ``ip netns``; ``address``: its only one beside
    loopback.
    """

    name: str
    namespace: str
    address: str
    hosts: Path

    def command(self, *words: object) -> list[str]:
        """``words`` as a command on this node. ``ip netns exec`` would hide /sys/fs/cgroup from
        slurmd.
        """
        enter = f'mount --bind {self.hosts} /etc/hosts && hostname {self.name} && exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", enter, "sh", *map(str, words)]
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *inside]

    def processes(self) -> list[int]:
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in done.stdout.split()]

    def kill(self) -> None:
        """The whole node at once: every process of the namespace, until none is left."""
        deadline = time.monotonic() + 10
        while (pids := self.processes()) and time.monotonic() < deadline:
            for pid in pids:
                with _gone():
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def cut(self) -> None:
        """Take the link down: packets vanish, no connection is closed."""
        _ip("-n", self.namespace, "link", "set", LINK, "down")


def why_not() -> str:
    """Why two nodes cannot be made here, or nothing."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "needs root for network namespaces"


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Both nodes; at the end all their processes are killed and the namespaces removed."""
    prefix = f"dcpo{os.getpid()}"
    hosts = folder / "hosts"
    pair = [Node(f"n{i}", f"{prefix}n{i}", f"10.55.0.{i}", hosts) for i in (1, 2)]
    hosts.write_text(
        "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.name}\n" for node in pair)
    )
    try:
        for node in pair:
            _ip("netns", "add", node.namespace)
        _ip(
            "link",
            "add",
            LINK,
            "netns",
            pair[0].namespace,
            "type",
            "veth",
            "peer",
            "name",
            LINK,
            "netns",
            pair[1].namespace,
        )
        for node in pair:
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", LINK)
            for link in ("lo", LINK):
                _ip("-n", node.namespace, "link", "set", link, "up")
        yield pair[0], pair[1]
    finally:
        for node in pair:
            if Path("/run/netns", node.namespace).exists():
                node.kill()
                _ip("netns", "del", node.namespace)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def _gone() -> Iterator[None]:
    with suppress(ProcessLookupError):
        yield
