"""``rollout.max_staleness`` with a server: generation beside training, on the quickstart's policy
and a server of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dcpo.errors import EXIT_REQUEUE
from tests.helpers.engine_server import SCRIPT, Served
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, command, metrics, train, without_clocks

MORE = (
    "objective.tis_level=token",
    "logging.samples_interval=1",
    "training.save_interval=1",
    "training.steps=5",
)


@pytest.fixture
def server() -> Iterator[Served]:
    with Served() as served:
        yield served


def options(served: Served, max_staleness: int = 1) -> tuple[str, ...]:
    return (*served.options, *MORE, f"rollout.max_staleness={max_staleness}")


def prompts(run_dir: Path) -> list[list[str]]:
    """The prompts of every step (all 32 samples are written)."""
    files = sorted((run_dir / "samples").glob("step_*.jsonl"))
    return [
        [json.loads(line)["prompt_id"] for line in file.read_text().splitlines()] for file in files
    ]


def assert_alike(records: list[dict[str, Any]], run_dir: Path) -> None:
    """The same but for rounding: what a server samples together depends on what has arrived."""
    for ours, single in zip(records, metrics(run_dir), strict=False):
        assert ours["reward/accuracy"] == single["reward/accuracy"]
        assert ours["loss/policy"] == pytest.approx(single["loss/policy"], abs=1e-4)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("async") / "run"
    with Served() as served:
        train(run_dir, *options(served))
    return run_dir


def test_the_weights_are_one_update_behind(undisturbed: Path) -> None:
    records = metrics(undisturbed)
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 1, 1, 1]
    assert all(record["rollout/staleness_mean"] <= 1 for record in records)
    assert all(
        record["time/rollout_busy"] >= record["time/rollout"] - 0.1 for record in records[1:-1]
    )
    assert records[0]["tis_weight"] == pytest.approx(1, abs=1e-5)
    assert all(abs(record["tis_weight"] - 1) > 1e-5 for record in records[1:]), (
        "old tokens have other weights"
    )
    drawn = prompts(undisturbed)
    assert [len(step) for step in drawn] == [32] * 5
    assert len({prompt for step in drawn for prompt in step}) == 5 * 8


def test_without_the_option_a_server_is_the_embedded_engine(server: Served, tmp_path: Path) -> None:
    """One after the other, the same prompts are sampled by the weights of the step before,
    as ever.
    """
    records = train(tmp_path / "server", *options(server, max_staleness=0), "training.steps=3")
    embedded = train(tmp_path / "embedded", *MORE, "training.steps=3")
    assert prompts(tmp_path / "server") == prompts(tmp_path / "embedded")
    assert not any(
        "staleness" in name or name == "time/rollout_busy" for record in records for name in record
    )
    for ours, other in zip(records, embedded, strict=True):
        assert abs(ours["engine/kl"]) < 1e-9, "the server has the policy's weights"
        assert abs(other["engine/kl"]) < 1e-9


def test_two_ranks_sample_beside_their_training(
    server: Served, undisturbed: Path, tmp_path: Path
) -> None:
    """The thread's collectives have a group of their own."""
    records = train(tmp_path / "run", *options(server), "training.steps=3", processes=2)
    assert prompts(tmp_path / "run") == prompts(undisturbed)[:3]
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 1]
    assert_alike(records, undisturbed)


def test_two_servers_are_one_bit_for_bit_and_one_may_die(tmp_path: Path) -> None:
    """Two ranks, each with a server of its own, and then with one that is started again."""
    two_steps = (*MORE, "training.steps=2", "rollout.engine=server")
    with Served(together=1) as first, Served(together=1) as second:

        def records(name: str, *servers: Served) -> list[dict[str, Any]]:
            endpoints = ",".join(server.endpoint for server in servers)
            where = f"rollout.endpoint={endpoints}"
            return train(tmp_path / name, *two_steps, where, processes=2)

        alone = without_clocks(records("one", first))
        asked = len(second.engine.sampled)
        together = without_clocks(records("two", first, second))
        assert asked == 0
        assert len(second.engine.sampled) == 32, "half of two steps"
        assert together == alone
        second.engine.fails_with = "1"
        second.engine.failing = lambda: second.start_again(1.0)
        before = second.engine
        disturbed = without_clocks(records("again", first, second))
        assert second.engine is not before, "it was away"
        assert disturbed == alone


def test_validation_and_an_early_stop_are_those_of_the_step(server: Served, tmp_path: Path) -> None:
    held_out = f"evaluation.benchmarks=heldout={QUICKSTART / 'data' / 'heldout.jsonl'}"
    more = (held_out, "evaluation.interval=1", "evaluation.limit=8", "training.keep_best=accuracy")
    records = train(
        tmp_path / "run", *options(server), *more, "training.early_stop=1", "optimizer.lr=0"
    )
    assert [record["step"] for record in records] == [0, 1, 2], "step 2 is not better than step 1"
    assert len({record["evaluation/heldout/accuracy"] for record in records}) == 1, (
        "a function of the weights"
    )


def test_a_server_that_loses_everything_in_a_rollout(
    server: Served, undisturbed: Path, tmp_path: Path
) -> None:
    """The batch is generated again, by the newer weights, from the same prompts."""
    server.engine.fails_with = "1"
    records = train(tmp_path / "run", *options(server), "training.steps=4")
    assert prompts(tmp_path / "run") == prompts(undisturbed)[:4]
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 0, 1]
    assert_alike(records[:2], undisturbed)


def start(run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """A training in a process that can be killed."""
    words = command(
        "train", "--config", QUICKSTART / "dcpo.yaml", f"run_dir={run_dir}", *SMALL, *overrides
    )
    return subprocess.Popen(
        words, cwd=REPOSITORY, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True
    )


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str]) -> None:
    path, deadline = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not (path.exists() and len(path.read_text().splitlines()) >= steps):
        assert process.poll() is None, f"ended with status {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_a_training_that_is_killed_or_warned(
    server: Served, undisturbed: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """What was on its way is generated again with the resumed weights: the same prompts, no step
    twice.
    """
    more = options(server)
    server.engine.pause = 0.03
    process = start(tmp_path / "run", *more)
    wait_for_steps(tmp_path / "run", 2, process)
    process.send_signal(number)
    assert process.wait(120) == (-signal.SIGKILL if number == signal.SIGKILL else EXIT_REQUEUE)
    server.engine.pause = 0.0
    records = train(tmp_path / "run", *more, "--resume", "auto")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert prompts(tmp_path / "run") == prompts(undisturbed)
    stale = [record["rollout/staleness_max"] for record in records]
    assert stale[0] == 0
    assert sorted(stale) == [0, 0, 1, 1, 1], (
        "the first after the resumption has the resumed weights"
    )


@pytest.mark.full  # tests/unit/rollout/test_serving.py has the watch alone
def test_launched_engines_are_started_again(undisturbed: Path, tmp_path: Path) -> None:
    """``dcpo launch --engines 1``; its server is killed while the run trains."""
    with Served() as served:  # a free port
        port = served.options[1]
    engines = ("--engines", 1, "--engine-command", f"{sys.executable} {SCRIPT}")
    verb = command("launch", 1, *engines, "--", "train", "--config", QUICKSTART / "async.yaml")
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [*verb, f"run_dir={run_dir}", *SMALL, *MORE, port],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(run_dir, 1, process)
    (engine,) = [
        c
        for c in psutil.Process(process.pid).children()
        if "engine_server" in " ".join(c.cmdline())
    ]
    engine.kill()
    _, log = process.communicate(timeout=240)
    assert process.returncode == 0, log[-3000:]
    assert "the engines' server ended with status -9" in log
    assert [record["step"] for record in metrics(run_dir)] == [1, 2, 3, 4, 5]
    assert prompts(run_dir) == prompts(undisturbed)
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if port.split(":")[-1][:-3] in (p.info["cmdline"] or [])
    ]
