"""Start ranks that run cases of ``tests/distributed/cases``, and read what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore

from tests.helpers import warm
from tests.helpers.paths import REPOSITORY

# this checkout first; what was installed beside it (tools/gpu_check.sh) stays
_PATHS = filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(_PATHS)}

Name = TypeVar("Name", bound=Hashable)

# the stores of the latest launches: each lasts longer than its ranks
_STORES: deque[TCPStore] = deque(maxlen=4)


def worker(out: Path, *jobs: tuple[str, dict[str, Any]]) -> list[str]:
    """Arguments for Python: run these cases, one after the other."""
    out.mkdir(parents=True, exist_ok=True)
    return ["-m", "tests.distributed.worker", str(out), json.dumps(jobs)]


def results_of(out: Path, rank: int) -> list[Any]:
    return json.loads((out / f"rank{rank}.json").read_text())


def launched(
    processes: int, arguments: list[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    return subprocess.run(
        [*launcher, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        cwd=REPOSITORY,
        timeout=timeout,
    )


def forked(
    processes: int, arguments: list[str], timeout: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the ranks of a worker without a launcher and its imports, and what they import under
    ``environment``.
    """
    own = [os.environ | rank | (environment or {}) for rank in ranks(processes)]
    return warm.run("tests.distributed.worker", arguments, own, timeout, environment)


def ranks(processes: int) -> list[dict[str, str]]:
    """Return the variables of each rank.

    As under torchrun the store is the launcher's: a free port that is only looked up can be taken
    before rank 0 listens on it.
    """
    _STORES.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    fixed = ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_STORES[-1].port)}
    fixed |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    fixed |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return [fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def alone(
    case: str, out: Path, options: dict[str, Any], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run one case in one process that is no rank of a job, however it ends."""
    arguments = worker(out, (case, options))[2:]
    return warm.run("tests.distributed.worker", arguments, [os.environ | ENVIRONMENT], timeout)


def torchrun_all(
    jobs: list[tuple[str, dict[str, Any]]],
    processes: int,
    out: Path,
    timeout: float = 600,
    environment: dict[str, str] | None = None,
) -> list[list[Any]]:
    """Run all jobs in one launch of ``processes`` ranks: for each job, the results of the ranks in
    order.

    To start ranks costs more than most cases do: what runs on as many ranks had better be started
    once.
    """
    done = forked(processes, worker(out, *jobs)[2:], timeout, environment)
    assert done.returncode == 0, (
        f"{[name for name, _ in jobs]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return [
        list(results)
        for results in zip(*(results_of(out, rank) for rank in range(processes)), strict=True)
    ]


def torchrun(
    case: str,
    processes: int,
    out: Path,
    options: dict[str, Any],
    timeout: float = 300,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run one case in ``processes`` ranks; returns each rank's result in rank order."""
    return torchrun_all([(case, options)], processes, out, timeout, environment)[0]


@dataclass(frozen=True)
class Run:
    """A case of ``tests/distributed/cases`` on so many ranks."""

    processes: int
    options: dict[str, Any]
    case: str = "policy"


def runs_by_name(
    runs: Mapping[Name, Run],
    full: Collection[Name],
    make_directory: Callable[[str], Path],
    **how: Any,
) -> Callable[[Name], list[Any]]:
    """Return a function of a name that returns the results of the run's ranks.

    Runs on as many ranks are made in one launch when the first of them is asked for; those in
    ``full``, which only the full suite asks for, have a launch of their own. ``how`` is for
    :func:`torchrun_all`.
    """
    made: dict[Name, list[Any]] = {}

    def get(name: Name) -> list[Any]:
        if name not in made:
            processes = runs[name].processes
            together = {
                other: run
                for other, run in runs.items()
                if run.processes == processes and (other in full) == (name in full)
            }
            jobs = [(run.case, run.options) for run in together.values()]
            results = torchrun_all(jobs, processes, make_directory(f"ranks{processes}"), **how)
            made.update(zip(together, results, strict=True))
        return made[name]

    return get


def without_launcher(
    case: str, processes: int, out: Path, options: dict[str, Any], **how: Any
) -> list[subprocess.Popen[str]]:
    """The same with no one who ends the other ranks when one dies."""
    command = [sys.executable, *worker(out, (case, options))]
    return [
        subprocess.Popen(command, env=os.environ | rank, cwd=REPOSITORY, **how)
        for rank in ranks(processes)
    ]
