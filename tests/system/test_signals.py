"""Stopping in good order: the warning of a scheduler saves and asks for a requeue, a dead launcher
leaves no orphan.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_dcpo.cli.launch import exit_status
from megatron_dcpo.errors import EXIT_INTERRUPTED, EXIT_PEER_LOST, EXIT_REQUEUE
from tests.helpers import warm
from tests.helpers.launch import ENVIRONMENT, ranks
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, command, metrics, run, without_clocks

OPTIONS = (
    "training.steps=400",
    "training.save_interval=0",
    "--resume",
    "auto",
)


def start(run_dir, *overrides, launch=0, log):
    """A training run in the background; its stderr goes to the file ``log``."""
    words = (
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        f"run_dir={run_dir}",
        *SMALL,
        *OPTIONS,
        *overrides,
    )
    whole = command("launch", launch, "--", *words) if launch else command(*words)
    with open(log, "w") as stderr:
        return subprocess.Popen(
            whole, cwd=REPOSITORY, stderr=stderr, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )


def wait_until(condition, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before it was time"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def saved_step(run_dir):
    return int((run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


@pytest.fixture(scope="module")
def stopped_by_warning(tmp_path_factory):
    """Two ranks, warned through the launcher in the middle of the run."""
    run_dir = tmp_path_factory.mktemp("warned") / "run"
    log = run_dir.with_suffix(".log")
    process = start(run_dir, launch=2, log=log)
    wait_until(lambda: "step 3/" in log.read_text(), process)
    process.send_signal(signal.SIGUSR1)
    return run_dir, process.wait(120), log.read_text()


def test_warning_saves_what_is_done_and_asks_for_a_requeue(stopped_by_warning):
    run_dir, status, said = stopped_by_warning
    assert status == EXIT_REQUEUE
    done = len(metrics(run_dir))
    assert 3 <= saved_step(run_dir) == done < 400
    assert f"stopped by SIGUSR1 after step {done} of 400, saved" in said
    assert "Traceback" not in said


def test_stopped_run_continues_bit_for_bit(stopped_by_warning, tmp_path):
    """Stopped, continued for one step, and compared with a run of that many steps that nobody
    stopped.
    """
    run_dir, _, _ = stopped_by_warning
    steps = saved_step(run_dir) + 1
    # overrides before and after an option: both are heard
    words = (
        "train",
        "--config",
        QUICKSTART / "dcpo.yaml",
        *SMALL,
        f"training.steps={steps}",
        "--resume",
        "auto",
    )
    for directory in (run_dir, tmp_path / "whole"):
        done = run(*words, f"run_dir={directory}", processes=2)
        assert done.returncode == 0, done.stderr[-2000:]
    assert without_clocks(metrics(run_dir)) == without_clocks(metrics(tmp_path / "whole"))
    ours, theirs = (
        Path(d, "policy", "model.safetensors").read_bytes() for d in (run_dir, tmp_path / "whole")
    )
    assert ours == theirs


def test_signal_cuts_a_long_rollout_short(tmp_path):
    """Nothing ends these responses of 50,000 tokens but the signal: the run leaves without having
    done its first step.
    """
    policy, log = tmp_path / "policy", tmp_path / "log"
    shutil.copytree(QUICKSTART / "policy", policy)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((policy / name).read_text())
        more = {"max_position_embeddings": 65536} if name == "config.json" else {}
        (policy / name).write_text(json.dumps(values | {"eos_token_id": [281]} | more))
    run_dir = tmp_path / "run"
    process = start(
        run_dir, f"model.path={policy}", "rollout.max_response_length=50000", launch=2, log=log
    )
    beats = [run_dir / "heartbeat" / f"rank0000{rank}.json" for rank in (0, 1)]
    wait_until(
        lambda: all(b.exists() and json.loads(b.read_text())["phase"] == "rollout" for b in beats),
        process,
    )
    os.kill(
        json.loads(beats[1].read_text())["pid"], signal.SIGTERM
    )  # one rank alone; the other one hears of it
    assert process.wait(120) == EXIT_REQUEUE
    assert "stopped by SIGTERM after step 0 of 400, nothing to save yet" in log.read_text()


LISTENING = """
import time
from megatron_dcpo.runtime import signals
signals.install_handlers()
signals.begin_saving()
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_second_signal_ends_at_once(number):
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING], stdout=-1, stderr=-1, text=True, cwd=REPOSITORY
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert "saving at the next boundary" in process.stderr.readline()
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    process.communicate()


# Every kind of signal in every phase of a step, DCPO_SIGNALS=all; otherwise two of them.
PHASES = ("setup", "rollout", "judge", "train", "save", "reshard", "evaluation")
NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")
KINDS = ("once", "twice", "one of two ranks")
EVERY = [(phase, name, kind) for phase in PHASES for name in NAMES for kind in KINDS]
FEW = [("train", "SIGTERM", "twice"), ("evaluation", "SIGUSR1", "once")]
SIGNALLED_STEP = 3
SIGNALLED = (
    "train",
    "--config",
    QUICKSTART / "dcpo.yaml",
    *SMALL,
    "training.steps=4",
    "training.save_interval=2",
    "evaluation.interval=1",
    "evaluation.limit=4",
    f"evaluation.benchmarks=heldout={QUICKSTART / 'data' / 'heldout.jsonl'}",
    "--resume",
    "auto",
)


@pytest.fixture(scope="module")
def unsignalled(tmp_path_factory):
    """Return the directory of the run of so many ranks that gets no signal."""
    made = {}

    def of(processes):
        if processes not in made:
            made[processes] = tmp_path_factory.mktemp("unsignalled") / "run"
            words = (*SIGNALLED, f"run_dir={made[processes]}")
            assert run(*words, processes=processes).returncode == 0
        return made[processes]

    return of


def signalled(phase, name, kind, run_dir):
    """Return the exit statuses of the ranks of a run of which the last one gets a signal, and what
    they said.
    """
    processes = 2 if kind == "one of two ranks" else 1
    times = 2 if kind == "twice" else 1
    how = (phase, SIGNALLED_STEP, name, times, processes - 1)
    words = [*map(str, how), *map(str, SIGNALLED), f"run_dir={run_dir}"]
    if processes == 1:
        environment = os.environ | ENVIRONMENT
        done = warm.run("tests.helpers.signalled", words, [environment], 120)
        return [done.returncode], done.stderr
    first, last = (
        subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.signalled", *words],
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=os.environ | own,
        )
        for own in ranks(processes)
    )
    said = last.communicate(timeout=120)[1]
    if phase == "setup":  # the first one would wait for it; a launcher would end it
        first.kill()
    said += first.communicate(timeout=120)[1]
    return [first.returncode, last.returncode], said


@pytest.mark.parametrize(
    ("phase", "name", "kind"), EVERY if os.environ.get("DCPO_SIGNALS") else FEW
)
def test_a_signal_in_any_phase_loses_nothing_that_was_saved(
    phase, name, kind, unsignalled, tmp_path
):
    """The first signal saves the step that is done, a second one leaves at once, and before the
    first step the first one does; the run then continues and ends as one that got none.
    """
    run_dir = tmp_path / "run"
    statuses, said = signalled(phase, name, kind, run_dir)
    has_begun = phase != "setup"
    status = EXIT_INTERRUPTED if name == "SIGINT" else EXIT_REQUEUE
    if has_begun and kind == "twice":
        status = 128 + signal.Signals[name]
    assert statuses[-1] == status, said[-3000:]
    assert "Traceback" not in said
    if not has_begun:
        assert not (run_dir / "metrics.jsonl").exists()
    else:
        assert set(statuses) == {status}, said[-3000:]
    if has_begun and kind != "twice":
        # a rollout is cut short; what follows it is finished
        done = SIGNALLED_STEP - (phase == "rollout")
        assert saved_step(run_dir) == done == metrics(run_dir)[-1]["step"]
    processes = len(statuses)
    resumed = run(*SIGNALLED, f"run_dir={run_dir}", processes=processes)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    whole = unsignalled(processes)
    assert without_clocks(metrics(run_dir)) == without_clocks(metrics(whole))
    assert weights(run_dir) == weights(whole)


def weights(run_dir):
    return (run_dir / "policy" / "model.safetensors").read_bytes()


STUCK = """
import subprocess, sys, time
import torch.distributed.run
from megatron_dcpo.cli import launch, main
launch._ALONE_SECONDS = 1.0
def run(args):
    subprocess.run([sys.executable, "-c", "import time; time.sleep(3)", "megatron_dcpo"])
    time.sleep(600)
torch.distributed.run.run = run
main(["launch", "1", "--nnodes", "2", "--", "train"])
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, EXIT_REQUEUE),
        (signal.SIGUSR1, EXIT_REQUEUE),
        (signal.SIGINT, EXIT_INTERRUPTED),
    ],
)
def test_a_signal_before_the_first_step_ends_at_once(number, status):
    """Also where the main thread waits for peers that never come."""
    code = (
        "import threading\nfrom megatron_dcpo.runtime import signals\n"
        "signals.install_handlers()\nprint('waiting', flush=True)\n"
        "threading.Event().wait(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
    )
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    assert process.wait(30) == status


def test_launcher_does_not_wait_for_a_lost_node():
    """torchrun's agent would: its workers have ended and it waits for those of the other node."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, cwd=REPOSITORY, timeout=120
    )
    assert done.returncode == EXIT_PEER_LOST
    assert "all workers of this node have ended" in done.stderr


def test_killed_rank_ends_the_job_and_is_named(tmp_path):
    log = tmp_path / "log"
    process = start(tmp_path / "run", launch=2, log=log)
    wait_until(lambda: "step 2/" in log.read_text(), process)
    workers = [child.pid for child in psutil.Process(process.pid).children()]
    os.kill(workers[1], signal.SIGKILL)
    assert process.wait(60) == EXIT_PEER_LOST
    assert f"rank 1 (pid {workers[1]}) was killed by SIGKILL" in log.read_text()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_workers_of_a_killed_launcher_end(tmp_path):
    log = tmp_path / "log"
    process = start(tmp_path / "run", launch=2, log=log)
    wait_until(lambda: "step 2/" in log.read_text(), process)
    workers = [child.pid for child in psutil.Process(process.pid).children()]
    assert len(workers) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert "the launcher of" in log.read_text()


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([99, -15], 99),
        ([99, 98], 99),
        ([-9], 98),
        ([98, -15], 98),
        ([2, -15], 2),
        ([1, 99], 1),
        ([130, -2], 130),
    ],
)
def test_exit_status_of_a_launcher(codes, status):
    assert exit_status(codes) == status
    assert exit_status(codes[::-1]) == status
    assert EXIT_PEER_LOST == 98
