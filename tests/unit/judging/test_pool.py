"""Verifier processes: hanging and dying pairs, caching, forks, their end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path

import pytest

from megatron_dcpo.judging import worker_pool as pool_module
from megatron_dcpo.judging.math.pool import MEMORY_BYTES, VerifierPool
from megatron_dcpo.judging.worker_pool import STARTS, WorkerNotStarted

pytestmark = pytest.mark.slow
HANGING = ["9^{9^{9^{9}}}", "100000000!", r"\sum_{k=1}^{10000000} \frac{1}{k^2+k+1}"]


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    made = VerifierPool(workers=1, cpu_seconds=1.0, wall_seconds=3.0)
    yield made
    made.close()


def workers_of(pool: VerifierPool) -> list[int]:
    return [worker.process.pid for worker in pool._workers]


def status_of(pool: VerifierPool) -> list[str]:
    return Path(f"/proc/{workers_of(pool)[0]}/status").read_text().splitlines()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_hanging_pairs_are_wrong_in_time_and_stop_nobody(pool: VerifierPool) -> None:
    pool.verify([("x+1", "1+x")])  # the start of the worker is not what is timed
    begin = time.monotonic()
    verdicts = pool.verify(
        [(HANGING[0], "5x"), ("x+2", "2+x"), (HANGING[1], "5x"), ("x+2", "x+3"), (HANGING[2], "5x")]
    )
    assert verdicts == [False, True, False, False, False]
    assert time.monotonic() - begin < 3 * (3.0 + 1.0) + 5
    begin = time.monotonic()
    assert pool.verify([(HANGING[0], "5x")] * 50) == [False] * 50  # remembered
    assert time.monotonic() - begin < 0.5


def test_a_worker_beyond_interruption_is_replaced() -> None:
    """The watchdog ends the process: with a processor limit that never comes, only the wall time is
    left.
    """
    pool = VerifierPool(workers=1, cpu_seconds=1000.0, wall_seconds=1.0)
    try:
        assert pool.verify([(HANGING[2], "5x"), ("x+1", "1+x")]) == [False, True]
        assert pool.statistics.replaced >= 1
        assert pool.statistics.late == pool.statistics.replaced
    finally:
        pool.close()


def test_a_killed_worker_costs_one_start(pool: VerifierPool) -> None:
    assert pool.verify([("x+1", "1+x")]) == [True]
    os.kill(workers_of(pool)[0], signal.SIGKILL)
    assert pool.verify([("x+4", "4+x")]) == [True]


def test_quick_pairs_start_no_process(pool: VerifierPool) -> None:
    assert pool.verify([("5", "5"), ("6", "5"), ("1/2", "0.5"), ("", ""), ("x", "x")]) == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert workers_of(pool) == []
    assert pool.statistics.quick == 5


def test_odd_text_is_wrong_and_harmless() -> None:
    """No worker dies of it; so the limit is one that a loaded machine does not reach."""
    pool = VerifierPool(workers=1, cpu_seconds=5.0, wall_seconds=120.0)
    odd = [
        "\ud800",
        "\x00",
        "a\nb",
        "\u2028",
        "(" * 900 + "x",
        "\\frac{",
        "}{",
        "\\" * 500,
        "\\int \\int",
        "#!%&",
    ]
    assert pool.verify([(text, "x+y") for text in odd]) == [False] * len(odd)
    assert pool.statistics.replaced == 0
    pool.close()


def _in_child(pool: VerifierPool, results: multiprocessing.Queue[list[bool]]) -> None:
    results.put(pool.verify([("x+1", "1+x"), ("x+5", "5+x")]))
    pool.close()


def test_a_forked_child_makes_its_own_workers(pool: VerifierPool) -> None:
    pool.verify([("x+1", "1+x")])
    mine = workers_of(pool)
    fork = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[list[bool]] = fork.Queue()
    child = fork.Process(target=_in_child, args=(pool, results))
    child.start()
    assert results.get(timeout=60) == [True, True]
    child.join(60)
    assert workers_of(pool) == mine
    assert pool.verify([("x+6", "6+x")]) == [True]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(how: signal.Signals) -> None:
    script = (
        "from megatron_dcpo.judging.math.pool import shared_pool; import time\n"
        "shared_pool().verify([('x+1', '1+x')])\n"
        "print(*[w.process.pid for w in shared_pool()._workers], flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    parent.send_signal(how)
    parent.wait()
    deadline = time.monotonic() + 15
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def test_workers_import_no_torch() -> None:
    script = "import sys, megatron_dcpo.judging.worker, megatron_dcpo.judging.math.equivalence as e"
    script += "; e.equivalent('x+1','1+x')"
    script += "; assert 'math_verify' in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "answer",
    ["2^{99999999999}", "10^{10^{9}}", r"\binom{10000000}{5000000}", "(x+y)^{500}", "9" * 999],
)
def test_memory_of_a_worker_is_bounded(answer: str) -> None:
    """Address space, so that even what is asked for and not used counts; and the next pair is
    judged as ever.
    """
    pool = VerifierPool(workers=1, cpu_seconds=2.0, wall_seconds=20.0)
    try:
        assert pool.verify([("x+1", "1+x"), (answer, "5x+1"), ("x+2", "2+x")]) == [
            True,
            False,
            True,
        ]
        status = dict(line.split(":", 1) for line in status_of(pool))
        assert int(status["VmPeak"].split()[0]) << 10 <= MEMORY_BYTES
    finally:
        pool.close()


def test_a_worker_that_has_used_up_its_memory_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It judges its pair, says that it was the last one, and ends; no other pair pays for it."""
    full = (
        "from megatron_dcpo.judging import worker as w; w._memory_in_use = lambda: (0, "
        "1 << 30); w.main()"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        pool_module.subprocess,
        "Popen",
        lambda command, **options: start([command[0], "-c", full, *command[3:]], **options),
    )
    pool = VerifierPool(workers=1, cpu_seconds=5.0, wall_seconds=60.0)
    try:
        assert pool.verify([("x+1", "1+x"), ("x+2", "5x"), ("x+3", "3+x")]) == [True, False, True]
        assert pool.statistics.replaced == 3
        assert workers_of(pool) == []
    finally:
        pool.close()


def test_the_verdicts_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "CACHE_CHARACTERS", 5000)
    pool = VerifierPool(workers=1)
    for number in range(100):
        record(pool, (f"{number}" + "x" * 900, "y"), False)
    assert 4 <= len(pool._cache) <= 6
    assert (
        pool._cached_characters
        == sum(len(answer) + len(key) for answer, key in pool._cache)
        <= 5000
    )
    assert record(pool, ("x" * 9000, "y"), True) is True
    assert (pool._cache, pool._cached_characters) == ({}, 0)


def record(pool: VerifierPool, pair: tuple[str, str], verdict: bool) -> bool:
    asked = pool._ask(pair)
    pool._record(pair, verdict)
    assert isinstance(asked, Future)
    return asked.result(timeout=0)


def test_callers_do_not_wait_for_each_other() -> None:
    """A hanging pair of one thread holds up neither a pair that needs no algebra nor, with another
    worker, one that does.
    """
    pool = VerifierPool(workers=2, cpu_seconds=1000.0, wall_seconds=5.0)
    try:
        pool.verify([("x+1", "1+x")])
        slow = threading.Thread(target=pool.verify, args=([(HANGING[0], "5x")],), daemon=True)
        slow.start()
        while not any(worker.pair for worker in pool._workers):
            time.sleep(0.01)
        assert pool.verify([("5", "5"), ("x+2", "2+x")]) == [True, True]
        assert slow.is_alive(), "the others were judged meanwhile"
        slow.join(60)
        assert pool.verify([(HANGING[0], "5x")]) == [False]
    finally:
        pool.close()


def test_closing_cancels_what_waits() -> None:
    pool = VerifierPool(workers=1, cpu_seconds=1000.0, wall_seconds=1000.0)
    ends: list[BaseException] = []

    def ask() -> None:
        try:
            pool.verify([(HANGING[0], "5x")])
        except BaseException as error:
            ends.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    while not any(worker.pair for worker in pool._workers):
        time.sleep(0.01)
    pool.close()
    asking.join(60)
    assert isinstance(ends[0], CancelledError)
    assert workers_of(pool) == []


def test_a_worker_that_cannot_start_is_an_error_for_all_who_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module.sys, "executable", "/bin/false")
    pool = VerifierPool(workers=1)
    for _ in range(2):
        with pytest.raises(WorkerNotStarted, match="a verifier process did not start"):
            pool.verify([("x+1", "1+x")])


@pytest.mark.parametrize("kills", [1, STARTS - 1, STARTS])
def test_a_worker_killed_while_it_starts_is_replaced(
    kills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel or an operator; not for ever."""
    pool = VerifierPool(workers=1)
    start = pool._start
    started: list[int] = []

    def start_and_kill() -> pool_module.Worker:
        worker = start()
        started.append(worker.process.pid)
        if len(started) <= kills:
            os.kill(worker.process.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(pool, "_start", start_and_kill)
    try:
        if kills < STARTS:
            assert pool.verify([("x+1", "1+x")]) == [True]
            assert len(started) == kills + 1
            assert pool.statistics.replaced == kills
            # they are counted in a row
            assert pool._failed_starts == 0
        else:
            with pytest.raises(WorkerNotStarted):
                pool.verify([("x+1", "1+x")])
            assert len(started) == STARTS
    finally:
        pool.close()


def test_workers_that_are_killed_together_have_failed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    many = STARTS + 2
    pool = VerifierPool(workers=many)
    start = pool._start
    started: list[int] = []

    def start_and_kill() -> pool_module.Worker:
        worker = start()
        started.append(worker.process.pid)
        if len(started) <= many:
            os.kill(worker.process.pid, signal.SIGKILL)
        return worker

    monkeypatch.setattr(pool, "_start", start_and_kill)
    pairs = [(f"x+{n}", f"{n}+x") for n in range(many * pool.work.pairs_per_worker)]
    try:
        assert pool.verify(pairs) == [True] * len(pairs)
        assert len(started) > many
    finally:
        pool.close()


@pytest.mark.parametrize(
    "pair", [("5x", "y" * 10**6), ("y" * 10**6, "5x"), ("y" * 10**6, "z" * 10**6)]
)
def test_long_answers_and_keys_are_wrong_without_a_process(
    pool: VerifierPool, pair: tuple[str, str]
) -> None:
    assert pool.verify([pair]) == [False]
    assert pool.verify([(pair[0], pair[0])]) == [True]
    assert workers_of(pool) == []
