"""Environments that others wrote, as data: ``verifiers:ENV`` of PrimeIntellect's
verifiers and ``nemo_gym:SERVER`` of NVIDIA's NeMo Gym, with options as
``verifiers:my-env?python=venv/bin/python&size=100``.

An environment runs in a process of its own, in the Python that ``python`` names (this one by
default), because it brings libraries that may not agree with ours; ``environment_guest`` is what
runs there. A row holds all that scoring its responses needs, so that they can be judged again
without the data; ``judging/environments.py`` does that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from megatron_dcpo.data.gym_tasks import query_of
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.runtime.brought import ENVIRONMENT_COLUMN, HASH_SEED

GUEST = Path(__file__).resolve().with_name("environment_guest")
_NUMBER = r"(-?[0-9]+(?:\.[0-9]+)?)"
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}")
_START = "import sys; sys.path.append(sys.argv.pop(1)); import dcpo_environment as guest; "
# runs a file as a program that imports the guest's modules, and none of its own directory
RUNS_FILE = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); del sys.argv[0]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment as a path names it.

    ``part`` of its problems, train or eval, "" if the path does not say; at most ``size`` problems,
    None for all. ``range`` is what its reward can be, None for 0 to 1. ``judge`` is what lets it
    ask a judge model: true, or an address. ``data`` is a file of problems, "" if it has its own.
    The other ``options`` are its own.
    """

    kind: str
    name: str
    python: str = sys.executable
    options: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    size: int | None = None
    range: tuple[float, float] | None = None
    judge: bool | str = False
    data: str = ""

    def described(self, held_out: bool = False) -> str:
        """Return the description that ``environment_guest`` reads."""
        return json.dumps(
            {
                "kind": self.kind,
                "name": self.name,
                "options": dict(self.options),
                "part": self.part,
                "held_out": held_out,
                "size": self.size,
                "range": self.range,
                "judge": self.judge,
                "data": self.data,
            }
        )

    @property
    def search_path(self) -> str:
        """Return the PYTHONPATH of its process: this process's, if it runs in the same Python."""
        if self.python != sys.executable:
            return ""
        return os.environ.get("PYTHONPATH", "")


def parse_environment(path: str) -> EnvironmentSpec:
    """Return the environment that ``path`` names. Raises :class:`UserError` for a bad value, and if
    there is no such Python.
    """
    kind, _, rest = path.partition(":")
    name = rest.partition("?")[0]
    if not name:
        raise UserError(f"{path}: name an environment, {kind}:NAME")
    options = query_of(path)
    own = {
        "python": options.pop("python", sys.executable),
        "part": options.pop("part", ""),
        "size": options.pop("size", None),
        "judge": options.pop("judge", False),
        "data": options.pop("data", "") if kind == "nemo_gym" else "",
    }
    reward_range = _range(path, options.pop("range", None))
    size = own["size"]
    if size is not None and (type(size) is not int or size < 1):
        raise UserError(f"{path}: size must be a whole number of at least 1")
    if own["part"] not in ("", "train", "eval"):
        raise UserError(f"{path}: part must be train or eval")
    address = kind == "nemo_gym" and isinstance(own["judge"], str)
    if not address and not isinstance(own["judge"], bool):
        wanted = "the address of a judge" if kind == "nemo_gym" else "true"
        raise UserError(f"{path}: judge must be {wanted}")
    data = str(own["data"])
    return EnvironmentSpec(
        kind=kind,
        name=name,
        python=_python(path, str(own["python"])),
        options=_own_options(path, options),
        part=own["part"],
        size=size,
        range=reward_range,
        judge=own["judge"],
        data=str(Path(data).expanduser()) if data else "",
    )


def _own_options(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the environment by its names for them."""
    own: dict[str, Any] = {}
    for option, value in options.items():
        name = option.removeprefix("arg.")
        if name in own:
            raise UserError(f"{path}: {name} and arg.{name} are the same option")
        own[name] = value
    return own


def _range(path: str, value: object) -> tuple[float, float] | None:
    if value is None:
        return None
    match = _RANGE.fullmatch(str(value))
    low, high = map(float, match.groups()) if match else (0.0, 0.0)
    if not low < high:
        raise UserError(
            f"{path}: range must be LOW..HIGH of the reward, such as -1..1, not {value!r}"
        )
    return low, high


def _python(path: str, name: str) -> str:
    """Return the executable that ``name`` is, in the working directory or on the PATH."""
    found = Path(name).expanduser()
    if os.access(found, os.X_OK) and found.is_file():
        # links are kept: they say which environment it is
        return os.path.abspath(found)
    on_path = None if os.sep in name else shutil.which(name)
    if on_path is None:
        raise UserError(
            f"{path}: no Python {name!r}; name the one of the virtual environment in which the "
            "environment is installed, python=venv/bin/python"
        )
    return on_path


def environment_rows(path: str, held_out: bool = False) -> list[dict[str, Any]]:
    """Return the problems of an environment as rows; ``held_out`` says that they are for an
    evaluation. Raises :class:`UserError`, with what the environment raised.

    A row holds ``problem``, a text or messages; ``answer``, a text to show or ""; the numbers that
    the environment tells of the problem; and in ``environment`` its path and the input of its
    scores.
    """
    spec = parse_environment(path)
    if spec.data and not Path(spec.data).is_file():
        raise UserError(f"{path}: no such file {spec.data}")
    done = _run_guest(path, spec, "guest.print_rows()", spec.described(held_out))
    rows: list[dict[str, Any]] = []
    for line in done.splitlines():
        found = json.loads(line)
        row: dict[str, Any] = dict(found["numbers"])
        row["problem"] = found["messages"]
        row["answer"] = str(found["answer"])
        row[ENVIRONMENT_COLUMN] = {"path": path, "input": found["input"]}
        if found["more_than_one_turn"]:
            row[ENVIRONMENT_COLUMN]["more_than_one_turn"] = found["more_than_one_turn"]
        rows.append(row)
    return rows


def environment_of(row: Mapping[str, Any] | None) -> str:
    """Return the path of the environment that a row's problem is of, "" if it is of none."""
    return str(((row or {}).get(ENVIRONMENT_COLUMN) or {}).get("path", ""))


def environment_digest(path: str) -> str:
    """Return a short digest of the sources of an environment and of the libraries it uses."""
    spec = parse_environment(path)
    return _run_guest(path, spec, "guest.print_digest()", spec.described()).strip()


def _run_guest(path: str, spec: EnvironmentSpec, call: str, described: str) -> str:
    """Return what ``call`` prints in the Python of an environment, and end what it has started.

    The output goes to files: a pipe stays open as long as a process that the environment leaves
    behind has it. Raises :class:`UserError` if the call fails.
    """
    environment = {**os.environ, "PYTHONHASHSEED": HASH_SEED, "PYTHONPATH": spec.search_path}
    name = path.partition("?")[0]
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                [spec.python, "-c", _START + call, str(GUEST), described],
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=said,
                env=environment,
                start_new_session=True,  # so that the processes it starts end with it
            )
        except OSError as error:
            raise UserError(
                f"{name}: {spec.python} is no Python that can be run ({error.strerror})"
            ) from None
        try:
            # without reaping it, so that its group is still its own
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            raise UserError(f"{name}: {_why_it_failed(process.returncode, said)}")
        printed.seek(0)
        return printed.read().decode()


def _why_it_failed(status: int, said: IO[bytes]) -> str:
    """Return the last line that a process wrote, and how it ended if it did not say that itself."""
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().rpartition("\n")
    last_line = one_line(lines[2], 500)
    if status == 1 and last_line:
        return last_line
    cause = f"with status {status}" if status > 0 else f"by signal {-status}"
    wrote = f"the last line that it wrote is: {last_line}" if last_line else ""
    return "; ".join(filter(None, [f"its process ended {cause}", wrote]))
