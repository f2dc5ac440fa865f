"""``rollout.async_steps: 1``: generation beside training, on the quickstart's policy and a server
of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_dcpo.errors import EXIT_REQUEUE
from tests.helpers.engine_server import SCRIPT, Served
from tests.helpers.paths import QUICKSTART, REPOSITORY
from tests.helpers.quickstart import SMALL, command, metrics, train

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


def options(served: Served, async_steps: int = 1) -> tuple[str, ...]:
    return (*served.options, *MORE, f"rollout.async_steps={async_steps}")


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
    assert [record["rollout/staleness_mean"] for record in records] == [0, 1, 1, 1, 1]
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
    records = train(tmp_path / "server", *options(server, async_steps=0))
    embedded = train(tmp_path / "embedded", *MORE)
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
    records = train(tmp_path / "run", *options(server), processes=2)
    assert prompts(tmp_path / "run") == prompts(undisturbed)
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 1, 1, 1]
    assert_alike(records, undisturbed)


def immediate(served: Served) -> tuple[str, ...]:
    """New weights within a batch, of which the client has at most 4 responses under way."""
    served.engine.pause = 0.03
    return (*options(served), "rollout.async_update=immediate", "rollout.max_num_seqs=4")


def assert_reported(records: list[dict[str, Any]], sampled: list[tuple[str, Any]]) -> None:
    """The staleness that the run reports is that of the weights with which the server sampled."""
    assert (
        len(set(sampled))
        == len({version for version, _ in sampled})
        == len({weights for _, weights in sampled})
    )
    reported: Counter[str] = Counter()
    for record in records:
        stale = round(32 * record["rollout/staleness_mean"])
        reported += Counter({str(record["step"] - 2): stale, str(record["step"] - 1): 32 - stale})
    assert reported == Counter(version for version, _ in sampled)


@pytest.mark.parametrize("processes", [1, 2])
def test_new_weights_within_a_batch(
    server: Served, undisturbed: Path, tmp_path: Path, processes: int
) -> None:
    records = train(tmp_path / "run", *immediate(server), processes=processes)
    assert prompts(tmp_path / "run") == prompts(undisturbed)
    assert records[0]["rollout/staleness_max"] == 0
    assert all(record["rollout/staleness_max"] <= 1 for record in records)
    assert any(0 < record["rollout/staleness_mean"] < 1 for record in records), (
        "two versions in one batch"
    )
    assert_reported(records, server.engine.sampled)
    assert all(record["time/rollout_busy"] > 0 for record in records[1:])


def test_a_server_that_dies_while_its_weights_are_replaced_within_a_batch(
    server: Served, undisturbed: Path, tmp_path: Path
) -> None:
    """What had come stays, what was held back is sent with the weights that it gets again."""
    reload, updates = server.http.reload, itertools.count()

    def dies(body: Any) -> Any:
        if next(updates) == 2:
            server.http.version = "0"
            for parameter in server.engine.model.parameters():
                parameter.data.zero_()
            raise RuntimeError("killed while weights are replaced")
        return reload(body)

    server.http.reload = dies
    records = train(tmp_path / "run", *immediate(server))
    assert next(updates) == 1 + 5 + 1
    assert prompts(tmp_path / "run") == prompts(undisturbed)
    assert_reported(records, server.engine.sampled)


@pytest.mark.parametrize("how", [options, immediate])
def test_validation_and_an_early_stop_are_those_of_the_step(
    server: Served, tmp_path: Path, how: Any
) -> None:
    held_out = f"evaluation.benchmarks=heldout={QUICKSTART / 'data' / 'heldout.jsonl'}"
    more = (held_out, "evaluation.interval=1", "evaluation.limit=8", "training.keep_best=accuracy")
    records = train(
        tmp_path / "run", *how(server), *more, "training.early_stop=1", "optimizer.lr=0"
    )
    assert [record["step"] for record in records] == [0, 1, 2], "step 2 is not better than step 1"
    assert len({record["evaluation/heldout/accuracy"] for record in records}) == 1, (
        "a function of the weights"
    )


def test_a_server_that_loses_everything_in_a_rollout(
    server: Served, undisturbed: Path, tmp_path: Path
) -> None:
    """The batch is generated anew, by the newer weights, from the same prompts."""
    server.engine.fails_with = "1"
    records = train(tmp_path / "run", *options(server))
    assert prompts(tmp_path / "run") == prompts(undisturbed)
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 0, 1, 1]
    assert_alike(records[:2], undisturbed)


def test_a_server_that_loses_everything_within_a_batch_with_new_weights(
    server: Served, undisturbed: Path, tmp_path: Path
) -> None:
    """It got them a moment before."""
    server.engine.fails_with = "1"
    records = train(tmp_path / "run", *immediate(server))
    assert server.engine.fails_with == ""
    assert prompts(tmp_path / "run") == prompts(undisturbed)
    assert 0 in [record["rollout/staleness_max"] for record in records[1:]]


def test_a_server_slower_than_training_by_ten(
    server: Served, undisturbed: Path, tmp_path: Path
) -> None:
    server.engine.pause = 0.07  # between two responses that finish; a step trains in 0.1 s
    records = train(tmp_path / "run", *options(server))
    assert prompts(tmp_path / "run") == prompts(undisturbed)
    assert [record["rollout/staleness_max"] for record in records] == [0, 1, 1, 1, 1]
    assert_alike(records, undisturbed)


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


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, options),
        pytest.param(signal.SIGUSR1, options, marks=pytest.mark.full),
        (signal.SIGUSR1, immediate),
    ],
)
def test_a_training_that_is_killed_or_warned(
    server: Served, undisturbed: Path, tmp_path: Path, number: signal.Signals, how: Any
) -> None:
    """What was on its way is generated anew with the resumed weights: the same prompts, no step
    twice.
    """
    more = how(server)
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
