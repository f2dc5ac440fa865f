# ruff: noqa: E501
"""Control groups around programs: what is written where, and, where the kernel lets us, that they
hold.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dcpo.errors import UserError
from megatron_dcpo.sandbox import cgroup
from megatron_dcpo.sandbox.limits import CodeLimits
from megatron_dcpo.sandbox.local import choose
from megatron_dcpo.sandbox.program_judge import SandboxSession
from megatron_dcpo.sandbox.tests import checked_tests

STDIN = checked_tests({"kind": "stdin", "cases": [{"input": "", "output": "1"}]})


@pytest.fixture
def session() -> Iterator[SandboxSession]:
    try:
        level = choose("auto")
    except UserError as error:
        pytest.skip(str(error))
    with SandboxSession(level, CodeLimits(test_seconds=20, memory_mb=256)) as session:
        yield session


@pytest.fixture
def hierarchy() -> Path:
    """A directory of control groups version 2 in which this user may make groups, with controllers
    or without.
    """
    for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (folder / "cgroup.subtree_control").exists():
            try:
                with cgroup.ControlGroups({}, folder).group():
                    return folder
            except OSError:
                continue
    pytest.skip("no control groups (version 2) that this user may make")


def test_a_program_is_in_its_group_and_the_group_goes_with_it(
    session: SandboxSession, hierarchy: Path
) -> None:
    session.groups = cgroup.ControlGroups({}, hierarchy)
    seen: list[set[str]] = []

    def look() -> None:
        for _ in range(400):
            for group in hierarchy.glob(f"dcpo-{os.getpid()}-*"):
                try:
                    seen.append(set((group / "cgroup.procs").read_text().split()))
                except OSError:
                    continue
            time.sleep(0.01)

    watcher = threading.Thread(target=look)
    watcher.start()
    assert session.judge("import time\ntime.sleep(2)\nprint(1)", STDIN).correct == 1
    watcher.join()
    assert any(seen), "the program was never in a group"
    assert not list(hierarchy.glob(f"dcpo-{os.getpid()}-*"))
    calls = checked_tests(
        {"kind": "function", "entry_point": "f", "cases": [{"args": [], "expected": 1}]}
    )
    assert session.judge("def f(): return 1", calls).correct == 1


def test_memory_and_processes_are_limited(session: SandboxSession) -> None:
    """What the sums of ``local.py`` cannot see: pages that processes share, and a moment's
    overshoot.
    """
    if cgroup.place() is None:
        pytest.skip(
            "no control groups with the memory and pids controllers here (docs/programs.md says "
            "how to get them)"
        )
    program = "import mmap, os\nm = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1\nprint(1)"
    assert session.judge(program, STDIN).category == "memory"
    bomb = "import os\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: os._exit(0)\n        n += 1\nexcept OSError: print(1)"
    assert session.judge(bomb, STDIN).category in ("passed", "wrong", "runtime_error", "timeout")


def test_limits_are_written_and_a_kill_for_memory_is_the_verdict(
    session: SandboxSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a directory that stands for the kernel's: the files of a group appear with it."""
    written: dict[str, str] = {}
    make = Path.mkdir

    def with_files(path: Path, *args: int, **options: bool) -> None:
        make(path, *args, **options)
        if path.name.startswith("dcpo-"):
            for name in (
                "memory.max",
                "memory.oom.group",
                "pids.max",
                "cgroup.procs",
                "cgroup.kill",
            ):
                (path / name).write_text("")
            (path / "memory.events").write_text("low 0\nmax 3\noom_kill 2\n")

    def remove(path: Path) -> None:
        written.update({file.name: file.read_text() for file in path.iterdir()})
        for file in path.iterdir():
            file.unlink()
        path.rmdir()

    monkeypatch.setattr(Path, "mkdir", with_files)
    monkeypatch.setattr(cgroup, "_remove", remove)
    session.groups = cgroup.ControlGroups(cgroup.limits_of(300 << 20, 7), tmp_path)
    assert session.judge("print(2)", STDIN).category == "memory"
    assert {
        name: written[name]
        for name in ("memory.max", "pids.max", "memory.oom.group", "cgroup.procs")
    } == {
        "memory.max": str(300 << 20),
        "pids.max": "7",
        "memory.oom.group": "1",
        "cgroup.procs": "0",
    }
    assert "memory.swap.max" not in written  # a kernel without swap has no such file


def test_a_named_place_that_does_not_do_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cgroup.VARIABLE, str(tmp_path))
    cgroup.place.cache_clear()
    try:
        with pytest.raises(UserError, match="DCPO_CGROUP=") as error:
            cgroup.place()
        assert "\n" not in str(error.value)
    finally:
        cgroup.place.cache_clear()


def test_groups_of_a_killed_judge_are_swept(tmp_path: Path) -> None:
    (tmp_path / "dcpo-999999999-0").mkdir()
    (tmp_path / f"dcpo-{os.getpid()}-0").mkdir()
    cgroup._sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"dcpo-{os.getpid()}-0"]
