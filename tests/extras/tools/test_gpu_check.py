"""``tools/gpu_check.sh``: what it carries, its limits, its words; the comparison with the plan, and
the marks of ``tests/gpu``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from tests.gpu import needs
from tests.helpers import memory
from tests.helpers.paths import REPOSITORY

SCRIPT = REPOSITORY / "tools" / "gpu_check.sh"
# Imports every module of the package; those of extras and of dcpo serve, which no item starts, have
# rooms of their own.
IMPORT_ALL = """
import importlib, pkgutil
import megatron_dcpo
for module in pkgutil.walk_packages(megatron_dcpo.__path__, "megatron_dcpo."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name not in (
            "reasoning_gym",
            "vllm",
            "inspect_ai",
            "starlette",
            "uvicorn",
            "prometheus_client",
        ):
            raise
"""


def names(variable: str) -> list[str]:
    """The packages that the script names."""
    return SCRIPT.read_text().split(f'\n{variable}="')[1].split('"')[0].split()


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_what_they_need(packages: list[str]) -> set[str]:
    """Packages and everything that they require, as far as it is installed here."""
    found: set[str] = set()
    todo = [canonical(name) for name in packages]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        with suppress(metadata.PackageNotFoundError):
            for needed in metadata.requires(name) or []:
                if "extra ==" not in needed:
                    todo.append(canonical(re.split(r"[^\w.-]", needed)[0]))
    return found


def only(site: Path, packages: set[str]) -> subprocess.CompletedProcess[str]:
    """Import everything in a Python that has nothing but these packages."""
    site.mkdir()
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(package)
            tops = {file.parts[0] for file in distribution.files or ()} - {"..", "bin"}
            for top in tops - {"__pycache__"}:
                if not (site / top).exists():
                    (site / top).symlink_to(distribution.locate_file(top))
    return subprocess.run(
        [sys.executable, "-S", "-c", IMPORT_ALL],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{REPOSITORY}:{site}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_what_is_carried_suffices(tmp_path: Path) -> None:
    """With what the machine has, in an environment that has nothing else."""
    there = with_what_they_need(names("MACHINE")) | set(map(canonical, names("OURS")))
    done = only(tmp_path / "site", there)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("missing", ["httpx2", "omegaconf", "megatron-core"])
def test_a_package_that_is_not_carried_is_seen(tmp_path: Path, missing: str) -> None:
    there = with_what_they_need(names("MACHINE")) | set(map(canonical, names("OURS")))
    done = only(tmp_path / "site", there - {missing})
    assert done.returncode == 1
    assert "No module named" in done.stderr


def test_every_package_is_pinned() -> None:
    """What is carried of ours has a version in constraints.txt; nothing of it is torch's."""
    pinned = {
        line.split("==")[0].lower()
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert {name.lower() for name in names("OURS")} <= pinned
    assert not set(names("OURS")) & set(names("MACHINE"))


def run(tmp_path: Path, *arguments: object, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [SCRIPT, *map(str, arguments)],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def stand_in(tmp_path: Path, script: str) -> dict[str, str]:
    """A Python that does something else, for every item."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return {"PYTHON": str(python)}


@pytest.mark.slow
def test_an_item_has_a_log_and_a_line(tmp_path: Path) -> None:
    """Here: a test is collected."""
    results = tmp_path / "results"
    status, said = run(tmp_path, "run", "-", results, 200, "resumption,evaluation", DRY="1")
    assert status == 0, said
    assert [line.split()[0] for line in said.splitlines()] == ["resumption", "evaluation"]
    assert {path.name for path in results.iterdir()} == {"all.tar.gz", "summary.txt"}
    assert (results / "summary.txt").read_text() == said
    with tarfile.open(results / "all.tar.gz") as archive:
        files = {Path(name).name for name in archive.getnames()}
    assert {"resumption.log", "evaluation.log"} <= files


def test_an_item_that_fails(tmp_path: Path) -> None:
    failing = stand_in(tmp_path, "echo no room >&2; exit 3")
    status, said = run(tmp_path, "run", "-", "results", 60, "memory,host_copies", **failing)
    assert status == 1
    lines = said.splitlines()
    assert [line.split()[:3] for line in lines[:2]] == [
        ["memory", "status", "3"],
        ["host_copies", "status", "3"],
    ]
    for name in ("memory", "host_copies"):
        assert "no room" in said.partition(f"---- {name}\n")[2], "the end of its log"


def test_the_time_is_kept_to(tmp_path: Path) -> None:
    """What an item has left ends with it."""
    waiting = stand_in(
        tmp_path, f'case "$1" in -c) exit 1;; esac; sleep 300 & echo $! > {tmp_path}/child; wait'
    )
    began = time.monotonic()
    status, said = run(tmp_path, "run", "-", "results", 11, "experts,graphs", **waiting)
    assert status == 1
    assert time.monotonic() - began < 30
    assert "experts" in said.splitlines()[0]
    assert "graphs: no time left" in said
    child = int((tmp_path / "child").read_text())
    if psutil.pid_exists(child):  # nobody has asked for its status
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_an_end_from_outside_leaves_what_there_is(tmp_path: Path) -> None:
    waiting = stand_in(
        tmp_path,
        f'case "$1" in -c) exit 1;; esac; echo begun; echo $$ > {tmp_path}/item; sleep 300',
    )
    arguments = [SCRIPT, "run", "-", tmp_path / "results", "200", "experts"]
    running = subprocess.Popen(arguments, env=os.environ | waiting)
    deadline = time.monotonic() + 60
    while not (tmp_path / "item").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    running.terminate()
    assert running.wait(timeout=60) == 143
    assert "begun" in log_of(tmp_path / "results", "experts")
    item = int((tmp_path / "item").read_text())
    if psutil.pid_exists(item):  # nobody has asked for its status
        assert psutil.Process(item).status() == psutil.STATUS_ZOMBIE


def log_of(results: Path, item: str) -> str:
    with tarfile.open(results / "all.tar.gz") as archive:
        file = archive.extractfile(f"./{item}.log")
        assert file is not None
        return file.read().decode()


def test_an_archive_is_unpacked_without_xz_and_cudnn_is_the_one_beside_torch(
    tmp_path: Path,
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "carried.py").write_text("print('unpacked')\n")
    with tarfile.open(tmp_path / "kit.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "site", "site")
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "xz").write_text("#!/bin/sh\nexit 1\n")
    (programs / "xz").chmod(0o755)
    script = f"""case "$1 $2" in
        *nvidia.cudnn*) echo /beside/torch;;
        -c*) exit 1;;
        "-m tarfile") exec {sys.executable} "$@";;
        *) echo "cuDNN: $CUDNN_HOME $CUDNN_PATH"; exec {sys.executable} -m carried;;
    esac"""
    environment = stand_in(tmp_path, script)
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    status, said = run(tmp_path, "run", "kit.tar.xz", "results", 60, "host_copies", **environment)
    assert status == 0, said
    assert log_of(tmp_path / "results", "host_copies").splitlines()[1:] == [
        "cuDNN: /beside/torch /beside/torch",
        "unpacked",
    ]


def test_what_tells_most_comes_first_and_fits_seven_minutes() -> None:
    items = re.findall(r"^ +item (\w+) (\d+) ", SCRIPT.read_text(), re.MULTILINE)
    first = ["machine", "sampler", "first_step", "packed_is_padded", "colocated", "ten_steps"]
    assert [name for name, _ in items[:6]] == first
    assert sum(int(limit) for _, limit in items[:6]) <= 430
    assert len({name for name, _ in items}) == len(items)


def metrics(path: Path, steps: range, accuracy: float) -> Path:
    path.mkdir()
    rows = [{"step": step, "reward/accuracy": accuracy * step, "loss/policy": 0} for step in steps]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path / "metrics.jsonl"


def test_two_trainings_side_by_side(tmp_path: Path) -> None:
    gpu, cpu = (metrics(tmp_path / name, range(1, 4), x) for name, x in (("gpu", 0.5), ("cpu", 1)))
    cut_short = metrics(tmp_path / "short", range(1, 3), 0.5)

    def beside(*files: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, REPOSITORY / "tools" / "beside.py", *files]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    lines = beside(gpu, cpu).stdout.splitlines()
    assert lines[0] == "step 1: accuracy 0.5 / 1, loss 0 / 0"
    assert lines[-2] == "3 steps, means: accuracy 1 / 2, loss 0 / 0"
    assert "seconds" in lines[-1], "a metric that no step has is named"
    assert beside(cut_short, cpu).stdout.splitlines()[-2].startswith("2 steps, means: ")
    assert beside(gpu, tmp_path / "nothing").returncode == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nowhere.tar.xz", "results", "60"],
        ["run", "-", "results", "soon"],
        ["run"],
        ["fly"],
        [],
    ],
)
def test_bad_use_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    status, said = run(tmp_path, *arguments)
    assert (status, said.count("\n")) == (2, 1)
    assert said.startswith("gpu_check.sh: ")


def test_comparison_with_the_plan():
    predicted = {"resting": 1_200_000_000, "update": 10_000_000_000, "save": 9_000_000_000}
    rows = memory.compare(predicted, predicted)
    assert [row.ratio for row in rows] == [1, 1, 1]
    assert memory.problems(rows) == []
    assert memory.shown(rows) == "resting 1.20/1.20 GB, update 10.00/10.00 GB, save 9.00/9.00 GB"
    more = memory.compare(predicted | {"update": 11_500_000_000}, predicted)
    assert memory.problems(more) == ["update: measured 11.50 GB, planned 10.00 GB"]
    assert memory.problems(memory.compare(predicted | {"save": 5_000_000_000}, predicted)) == [
        "save: measured 5.00 GB, planned 9.00 GB"
    ]
    with pytest.raises(KeyError, match="save"):
        memory.compare({"resting": 1, "update": 1}, predicted)


def test_marks_name_what_is_missing():
    one, two = needs.gpus(2, found=1), needs.gpus(2, found=2)
    assert (one.args, one.kwargs["reason"]) == ((True,), "needs 2 GPUs, this machine has 1")
    assert two.args == (False,)
