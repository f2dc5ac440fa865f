"""A real Slurm on two nodes made of network namespaces: munged, slurmctld and two slurmd, all below
one folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.multinode.nodes import Node, two_nodes

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

# cred_expire: a requeued job waits this long. A fake GPU per node makes the header's
# --gpus-per-node hold.
CONFIGURATION = """
ClusterName=dcpo
SlurmctldHost={head.name}({head.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,bf_interval=5
GresTypes=gpu
ReturnToService=2
RequeueExit=99
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Cluster:
    """``nodes``: the first runs slurmctld and the client commands."""

    folder: Path
    nodes: tuple[Node, Node]

    def call(
        self,
        *words: object,
        node: int = 0,
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> str:
        """Standard output of a command on a node, 30 s at most."""
        done = subprocess.run(
            self.nodes[node].command(*words),
            env=os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")} | (environment or {}),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """``scontrol show job`` as a dictionary: JobState, Restarts, ExitCode, ..."""
        return dict(
            word.split("=", 1)
            for word in self.call("scontrol", "-o", "show", "job", job).split()
            if "=" in word
        )


@contextmanager
def slurm() -> Iterator[Cluster]:
    """Both nodes idle; at the end every process of the cluster and its folder are gone."""
    with tempfile.TemporaryDirectory(prefix="dcpo-slurm-") as name, two_nodes(Path(name)) as nodes:
        folder = Path(name)
        folder.chmod(0o711)  # munge wants its socket within everybody's reach
        cluster = Cluster(folder, nodes)
        _configure(folder, nodes)
        munge = folder / "munge"
        cluster.call(
            "munged",
            f"--key-file={munge}/key",
            f"--socket={munge}/socket",
            f"--pid-file={munge}/pid",
            f"--log-file={munge}/log",
            f"--seed-file={munge}/seed",
        )
        cluster.call("slurmctld", "-i")
        for index in (0, 1):
            cluster.call("slurmd", node=index)
        deadline = time.monotonic() + 60
        while cluster.call("sinfo", "-h", "-o", "%D %t").split() != ["2", "idle"]:
            assert time.monotonic() < deadline, cluster.call("sinfo")
            time.sleep(0.5)
        yield cluster


def _configure(folder: Path, nodes: tuple[Node, Node]) -> None:
    for name in ("state", "spool-n1", "spool-n2", "munge"):
        (folder / name).mkdir()
    (folder / "munge").chmod(0o711)
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    lines = [
        f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} CPUs=2 "
        "RealMemory=2000 Gres=gpu:1"
        for node in nodes
    ]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(folder=folder, head=nodes[0], nodes="\n".join(lines))
    )
    (folder / "gres.conf").write_text("NodeName=n1,n2 Name=gpu File=/dev/null\n")


def why_not() -> str:
    missing = [
        daemon
        for daemon in DAEMONS
        if shutil.which(daemon, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    return f"needs Debian's slurm-wlm and munge ({', '.join(missing)} not found)" if missing else ""
