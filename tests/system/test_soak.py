"""A long run leaks nothing: memory, threads, open files, child processes, shared memory.

``make test-soak`` runs 500 steps of the quickstart (DCPO_SOAK); the suite runs a short version of
the same.
"""

import json
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.processes import below
from tests.helpers.quickstart import command

STEPS = int(os.environ.get("DCPO_SOAK", "40"))
FULL = STEPS >= 500
# The short version is about counts; in its few steps the allocator is still finding its size.
FLAT = 1.02 if FULL else 1.10
# A file that is being written; threads of the judge's pool, which starts one when all it has are
# busy (up to 32). One more per save would be 3 in the short version, one more per step 18.
GROWTH = {"files": 1, "threads": 2}
OPTIONS = () if FULL else ("data.prompts_per_step=8", "training.save_interval=5")


def look(pid):
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    command_line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    role = "verifier" if "judging.worker" in command_line else "trainer"
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return (pid, role, {"rss": resident, "threads": int(status["Threads"]), "files": files})


def shared_memory(pid):
    """Names in /dev/shm that a process has mapped or open (other programs of the machine use it as
    well).
    """
    mapped = re.findall(r"/dev/shm/\S+", Path(f"/proc/{pid}/maps").read_text())
    opened = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    return {name for name in (*mapped, *opened) if name.startswith("/dev/shm/")}


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_nothing_leaks(tmp_path):
    run_dir = tmp_path / "run"
    words = (
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        f"run_dir={run_dir}",
        f"training.steps={STEPS}",
        *OPTIONS,
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command(*words), cwd=REPOSITORY, env=environment, stderr=subprocess.DEVNULL
    )
    seen = []
    everyone, shared = set(), set()
    while process.poll() is None:
        step = len(lines) if (lines := records(run_dir)) else 0
        for pid in (process.pid, *below(process.pid)):
            everyone.add(pid)
            try:
                seen.append((step, *look(pid)))
                shared |= shared_memory(pid)
            except (OSError, KeyError, ValueError):  # it has just ended
                continue
        time.sleep(0.25)
    assert process.returncode == 0
    assert len(records(run_dir)) == STEPS
    warm = STEPS // 5
    for role in ("trainer", "verifier"):
        for quantity in ("rss", "threads", "files"):
            early = [
                q[quantity] for step, pid, r, q in seen if r == role and warm < step <= STEPS // 2
            ]
            late = [
                q[quantity] for step, pid, r, q in seen if r == role and STEPS // 2 < step < STEPS
            ]
            if early and late:
                print(
                    role, quantity, "early median", np.median(early), "late median", np.median(late)
                )
                more = (np.median(late) - np.median(early), max(late) - max(early))
                if quantity == "rss":
                    assert more[0] <= (FLAT - 1) * np.median(early), role
                else:
                    assert max(more) <= GROWTH[quantity], (role, quantity)
    assert not [pid for pid in everyone if Path(f"/proc/{pid}").exists()]
    assert not [name for name in shared if Path(name).exists()]
    left = [
        path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")
    ]  # torch's cache
    assert not left
    resident = [record["memory/train/rss"] for record in map(json.loads, records(run_dir))]
    assert np.median(resident[STEPS // 2 :]) <= np.median(resident[warm : STEPS // 2]) * FLAT


def records(run_dir):
    try:
        return (run_dir / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
