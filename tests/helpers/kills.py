"""``dcpo`` that is killed again and again, and each time continued by the same command."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers import warm
from tests.helpers.quickstart import run

KILLS = int(os.environ.get("DCPO_KILLS", "2"))
KILLS_OF_A_ROUND = 2
_SOONER = 0.5  # of the seconds in which a process was to be killed that ended before
_SHORTLY = 0.03  # seconds in which a file that has begun to change is complete


@dataclass
class Moment:
    """A random moment within ``seconds``; ``at_a_change``, one shortly after a file below
    ``directory`` has changed.
    """

    directory: Path
    seconds: float
    at_a_change: bool
    chosen: random.Random
    _begun: float = field(default_factory=time.monotonic)
    _before: object = None
    _until: float | None = None

    def __post_init__(self) -> None:
        self._wait = self.chosen.uniform(0, self.seconds)

    def has_come(self) -> bool:
        now = time.monotonic()
        if now - self._begun < self._wait:
            return False
        if not self.at_a_change:
            return True
        if self._until is None:
            state = _state(self.directory)
            if self._before is None:
                self._before = state
            elif state != self._before:
                self._until = now + self.chosen.uniform(0, _SHORTLY)
        return self._until is not None and now >= self._until


def _state(directory: Path) -> list[tuple[str, int]]:
    """Return names and sizes of all files below a directory, which may go while it is read."""
    found = []
    for root, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(root, name)
            try:
                found.append((path, os.stat(path).st_size))
            except FileNotFoundError:
                found.append((path, -1))
    return sorted(found)


@dataclass(frozen=True)
class Rounds:
    """How many kills met a running process, and how many rounds were compared."""

    killed: int
    compared: int


def killed_in_rounds(
    words_of: Callable[[Path], Sequence[object]],
    results_of: Callable[[Path], dict[str, object]],
    scratch: Path,
    kills: int = KILLS,
    **environment: str,
) -> Rounds:
    """Run a command undisturbed, then in rounds: killed ``KILLS_OF_A_ROUND`` times in a new
    directory, every other time while it writes, and continued to its end, until ``kills`` of them
    met a running process. Asserts that each round ends with the results of the undisturbed one.
    """
    chosen = random.Random(kills)
    undisturbed = scratch / "whole" / "run"
    begun = time.monotonic()
    whole = run(*words_of(undisturbed), **environment)
    seconds = time.monotonic() - begun
    assert whole.returncode == 0, whole.stderr[-3000:]
    expected = {"stdout": whole.stdout, **results_of(undisturbed)}
    own = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    killed = compared = 0
    within = seconds
    while killed < kills:
        directory = scratch / f"round{compared}" / "run"  # a card and a report name the last part
        words = [*map(str, words_of(directory))]
        for _ in range(KILLS_OF_A_ROUND):
            moment = Moment(directory, within, at_a_change=killed % 2 == 0, chosen=chosen)
            ended = warm.kill("megatron_dcpo", words, own, moment.has_come)
            if ended.returncode == 0:  # it was faster: sooner in the next round
                within *= _SOONER
                break
            assert ended.returncode == -9, ended.stderr[-3000:]
            within = seconds
            killed += 1
        last = run(*words, **environment)
        assert last.returncode == 0, last.stderr[-3000:]
        assert "Traceback" not in last.stderr
        said = last.stdout.replace(str(directory), str(undisturbed))
        found = {"stdout": said, **results_of(directory)}
        assert found.keys() == expected.keys()
        different = [name for name in found if found[name] != expected[name]]
        assert not different, f"round {compared}: {different}"
        compared += 1
    return Rounds(killed=killed, compared=compared)
