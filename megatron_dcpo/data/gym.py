"""Reasoning Gym's procedural tasks as data: ``reasoning_gym:TASK``, or
``reasoning_gym:TASK?min_terms=3&size=100&seed=7``.

Problem i of a task is a function of its options and of seed + i. They are made in a process of
their own: some tasks depend on the order of Python's sets, which ``PYTHONHASHSEED`` fixes, and what
they draw or print is no affair of a run. ``judging/gym.py`` makes the same problem again to score
an answer.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from megatron_dcpo.errors import UserError, did_you_mean, one_line, pip_install
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.types import REASONING_GYM

if TYPE_CHECKING:
    from reasoning_gym.factory import ProceduralDataset

VERIFIER = "megatron_dcpo.judging.gym:score"  # what scores the answers
HELD_OUT_SEED = (
    10**9
)  # of a benchmark: training counts from its seed, 0 unless it is named, and does not come here
HASH_SEED = "0"
_SCALARS = str | int | float | bool


@dataclass(frozen=True)
class GymTask:
    """Problems ``seed`` to ``seed + size - 1`` of the task ``name`` with ``options`` of its own."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int = 500
    seed: int = 0


def is_gym(path: object) -> bool:
    """Return whether ``path`` names a task of Reasoning Gym."""
    return str(path).startswith(REASONING_GYM)


def gym_path(
    path: str, options: Mapping[str, Any], size: int | None, seed: int | None
) -> str:
    """Return ``path`` with options written into it, where it has none of that name."""
    more = {
        **options,
        **{k: v for k, v in (("size", size), ("seed", seed)) if v is not None},
    }
    query = {
        name: json.dumps(value)
        for name, value in more.items()
        if name not in _query(path)
    }
    return f"{path}{'&' if '?' in path else '?'}{urlencode(query)}" if query else path


def _query(path: str) -> dict[str, str]:
    return dict(parse_qsl(path.partition("?")[2], keep_blank_values=True))


def parse_gym(path: str) -> GymTask:
    """Return the task that ``path`` names. Raises :class:`UserError` for a size or seed that is
    none.
    """
    options: dict[str, Any] = {}
    for name, text in _query(path).items():
        try:
            options[name] = parse_json(text)
        except ValueError:
            options[name] = text
    numbers = {name: options.pop(name) for name in ("size", "seed") if name in options}
    for name, value in numbers.items():
        if type(value) is not int or value < (name == "size"):
            raise UserError(
                f"{path}: {name} must be a whole number of at least {int(name == 'size')}"
            )
    return GymTask(
        path.removeprefix(REASONING_GYM).partition("?")[0], options, **numbers
    )


def gym_rows(path: str) -> list[dict[str, Any]]:
    """Return the problems of a task as rows: ``problem``, ``answer`` (empty where many are right),
    the numbers and texts of its metadata, and in ``reasoning_gym`` what makes it again. Raises
    :class:`UserError`.
    """
    task = parse_gym(path)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(
            f"{path}: the package reasoning-gym is not installed; {pip_install('gym')}"
        )
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [root, os.environ.get("PYTHONPATH")])
    )
    command = [sys.executable, "-m", "megatron_dcpo.data.gym", json.dumps(asdict(task))]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise UserError(
            f"{path}: {one_line(done.stderr.strip().rpartition(chr(10))[2], 500)}"
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


@functools.cache
def dataset_of(task: str) -> ProceduralDataset:
    """Return Reasoning Gym's data set of a task, which is a :class:`GymTask` as JSON."""
    import reasoning_gym

    values = json.loads(task)
    return reasoning_gym.create_dataset(
        values["name"], **values["options"], size=values["size"], seed=values["seed"]
    )


def _rows(task: str) -> Iterator[dict[str, Any]]:
    dataset = dataset_of(task)
    for index in range(len(dataset)):
        entry = dataset[index]
        facts = {**(entry["metadata"].get("difficulty") or {}), **entry["metadata"]}
        columns = {
            name: value for name, value in facts.items() if isinstance(value, _SCALARS)
        }
        own = {"problem": entry["question"], "answer": entry["answer"] or ""}
        yield {**columns, **own, "reasoning_gym": {"task": task, "index": index}}


def _main() -> None:
    """Print the rows of the task in the first argument as JSON lines, or why there are none."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # some tasks print
    from reasoning_gym.factory import DATASETS

    name = json.loads(sys.argv[1])["name"]
    if name not in DATASETS:
        sys.exit(f"Reasoning Gym has no task {name!r}{did_you_mean(name, DATASETS)}")
    try:
        for row in _rows(sys.argv[1]):
            out.write(json.dumps(row) + "\n")
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {one_line(error, 300)}")
    out.flush()


if __name__ == "__main__":
    _main()
