"""``benchmarks/run.py`` on benchmarks of milliseconds: its lines, its page, goals in both
directions, what fails.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import REPOSITORY

RUN = REPOSITORY / "benchmarks" / "run.py"
KEYS = {"name", "ours", "other", "ratio", "goal", "met", "unit", "other_is", "command"}
FAKE = """
from measurement import Measurement, absent, in_turns, not_installed, timed

def measurements():
    turns = in_turns(3, ours=lambda: sum(range(1000)), other=lambda: sum(range(100_000)))
    same = turns["ours"].result == turns["other"].result
    yield timed("quick", turns["ours"], turns["other"], "a longer sum", goal=10.0, same=not same)
    print("not a result")
    for name, ours, goal, at_least in (
        ("below", 1.0, 0.5, False), ("at", 1.0, 0.25, False), ("above", 1.0, 0.2, False),
        ("enough", 3.0, 0.75, True), ("too little", 2.9, 0.75, True),
    ):
        yield Measurement(name, ours, 4.0, "s", "theirs", goal=goal, at_least=at_least)
    for name, goal in (("bounded", 0.2), ("bounded, met", 0.3)):
        yield Measurement(name, 1.0, 4.0, "s", "theirs", goal=goal, bound=0.22, bound_is="the wire")
    yield Measurement("no goal", 1.0, 4.0, "s", "theirs")
    yield absent("peer", "s", "Peer 1.0", not_installed("peer==1.0"), goal=1.0)
"""
UNEQUAL = """
from measurement import Measurement

def measurements():
    yield Measurement("unequal", 1.0, 4.0, "s", "theirs", goal=1.0, same=False)
"""
BROKEN = """
from measurement import Measurement

def measurements():
    yield Measurement("first", 1.0, 4.0, "s", "theirs", goal=1.0)
    raise RuntimeError("no room")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fakes beside the real ``run.py`` and ``measurement.py``."""
    for source in (RUN, RUN.with_name("measurement.py")):
        (tmp_path / source.name).write_text(source.read_text())
    for name, text in (
        ("fake", FAKE),
        ("unequal", UNEQUAL),
        ("broken", BROKEN),
        ("helper", "X = 1\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(folder / "run.py"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"DCPO_PEERS": ""}
    )


def test_lines_page_and_goals(folder: Path) -> None:
    done = run(folder, "fake", "--json")
    assert done.returncode == 0, done.stderr
    lines = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert all(line.keys() >= KEYS for line in lines.values())
    met = {name: line["met"] for name, line in lines.items()}
    assert met == {
        "quick": True,
        "below": True,
        "at": True,
        "above": False,
        "enough": True,
        "too little": False,
        "bounded": False,
        "bounded, met": True,
        "no goal": None,
        "peer": None,
    }
    assert lines["quick"]["ratio"] == pytest.approx(
        lines["quick"]["ours"] / lines["quick"]["other"], rel=1e-3
    )
    assert lines["quick"]["command"] == "python benchmarks/run.py fake"
    assert "pip install peer==1.0" in lines["peer"]["reason"]
    assert lines["peer"]["ours"] is lines["peer"]["ratio"] is None
    page = (folder / "RESULTS.md").read_text()
    assert "| above | 1 | 4 | s | theirs | 0.25 | at most 0.2 | **no** |" in page
    assert (
        "| bounded | 1 | 4 | s | theirs | 0.25 | at most 0.2 | **no**: not below 0.22: the wire |"
        in page
    )
    assert "| bounded, met | 1 | 4 | s | theirs | 0.25 | at most 0.3 | yes |" in page
    assert lines["bounded"]["bound"] == 0.22
    assert "| too little | 2.9 | 4 | s | theirs | 0.725 | at least 0.75 | **no** |" in page
    raw = [json.loads(line) for line in page.partition("```json\n")[2].splitlines()[:-1]]
    assert len(raw[0]["raw"]["ours"]["cpu_s"]) == 3
    assert "cores of" in page


def test_unequal_results_fail(folder: Path) -> None:
    done = run(folder, "unequal", "--json")
    line = json.loads(done.stdout)
    assert (done.returncode, line["met"], line["ratio"]) == (1, False, 0.25)
    assert "the results differ" in line["reason"]


def test_a_benchmark_that_breaks_says_so_and_keeps_what_it_measured(folder: Path) -> None:
    done = run(folder, "broken")
    assert done.returncode == 1
    assert "first: 1 against 4" in done.stdout
    assert "broken: the benchmark ended with status 1" in done.stdout
    assert "no room" in done.stderr


def test_results_of_other_benchmarks_are_kept(folder: Path) -> None:
    run(folder, "fake")
    run(folder, "unequal")
    run(folder, "unequal")
    page = (folder / "RESULTS.md").read_text()
    assert page.count("\n| unequal | ") == 1
    assert page.count("\n| below | ") == 1


def test_an_unknown_name_is_one_line(folder: Path) -> None:
    done = run(folder, "fake", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "nonsense" in line
    assert "broken, fake, unequal" in line
    assert not (folder / "RESULTS.md").exists()


def test_every_benchmark_is_found() -> None:
    done = run(RUN.parent, "--list")
    assert set(done.stdout.split()) >= {"convert", "packing", "plan_memory"}


def test_the_readme_has_a_row_of_every_benchmark() -> None:
    listed = subprocess.run(
        [sys.executable, str(RUN), "--list"], capture_output=True, text=True, check=True
    )
    rows = re.findall(r"^\| `(\w+)` \|", RUN.with_name("README.md").read_text(), re.M)
    assert sorted(rows) == listed.stdout.split()
