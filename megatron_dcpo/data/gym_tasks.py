"""Reasoning Gym's procedural tasks as data: ``reasoning_gym:TASK``, or
``reasoning_gym:TASK?min_terms=3&size=100&seed=7``.

Problem i of a task is a function of its options and of seed + i. The problems are made in a
separate process, because some tasks depend on the order of Python's sets, which ``PYTHONHASHSEED``
fixes, and because their random numbers and printed text must not affect a run. ``judging/gym.py``
makes the same problem again to score an answer.
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

from megatron_dcpo.data.labels import kind_of_row
from megatron_dcpo.errors import UserError, did_you_mean, one_line, pip_install
from megatron_dcpo.runtime.brought import HASH_SEED, REASONING_GYM
from megatron_dcpo.runtime.text import parse_json

if TYPE_CHECKING:
    from reasoning_gym.factory import ProceduralDataset

# The seed of benchmarks. Training counts up from its seed, by default 0, and does not get this far.
HELD_OUT_SEED = 10**9
_SCALARS = str | int | float | bool


@dataclass(frozen=True)
class GymTask:
    """Problems ``seed`` to ``seed + size - 1`` of the task ``name`` with its ``options``."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    size: int = 500
    seed: int = 0


def gym_path(path: str, options: Mapping[str, Any], size: int | None, seed: int | None) -> str:
    """Return ``path`` with the options added that it does not set itself."""
    more = dict(options)
    if size is not None:
        more["size"] = size
    if seed is not None:
        more["seed"] = seed
    known = _texts_of(path)
    query = {}
    for name, value in more.items():
        if name not in known:
            query[name] = _as_text(value)
    if not query:
        return path
    separator = "&" if "?" in path else "?"
    return f"{path}{separator}{urlencode(query, safe='/')}"


def _as_text(value: object) -> str:
    """Return a text that :func:`query_of` reads as ``value``: itself if it is no JSON."""
    if isinstance(value, str):
        try:
            parse_json(value)
        except ValueError:
            return value
    return json.dumps(value)


def _texts_of(path: str) -> dict[str, str]:
    return dict(parse_qsl(path.partition("?")[2], keep_blank_values=True))


def query_of(path: str) -> dict[str, Any]:
    """Return what follows the question mark of a path: JSON values, and texts that are no JSON."""
    options: dict[str, Any] = {}
    for name, text in _texts_of(path).items():
        try:
            options[name] = parse_json(text)
        except ValueError:
            options[name] = text
    return options


def parse_gym(path: str) -> GymTask:
    """Return the task that ``path`` names. Raises :class:`UserError` for a bad size or seed."""
    options = query_of(path)
    numbers: dict[str, int] = {}
    for name, least in (("size", 1), ("seed", 0)):
        if name not in options:
            continue
        value = options.pop(name)
        if type(value) is not int or value < least:
            raise UserError(f"{path}: {name} must be a whole number of at least {least}")
        numbers[name] = value
    task = path.removeprefix(REASONING_GYM).partition("?")[0]
    return GymTask(task, options, **numbers)


def gym_rows(path: str) -> list[dict[str, Any]]:
    """Return the problems of a task as rows. Raises :class:`UserError`.

    A row holds ``problem``, ``answer`` (empty if many are right), the numbers and texts of the
    metadata, and in ``reasoning_gym`` the values from which the problem can be made again.
    """
    task = parse_gym(path)
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(f"{path}: the package reasoning-gym is not installed; {pip_install('gym')}")
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "megatron_dcpo.data.gym_tasks", json.dumps(asdict(task))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise UserError(f"{path}: {one_line(last_line, 500)}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def problem_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row of :func:`gym_rows` is by the names of the schema; its other columns are
    its scorer's.
    """
    return {"problem": row["problem"], "answer": row["answer"], "kind": kind_of_row(row)}


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
        row: dict[str, Any] = {}
        for name, value in facts.items():
            if isinstance(value, _SCALARS):
                row[name] = value
        row["problem"] = entry["question"]
        row["answer"] = entry["answer"] or ""
        row["reasoning_gym"] = {"task": task, "index": index}
        yield row


def _main() -> None:
    """Print the rows of the task in the first argument as JSON lines, or an error."""
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
