"""``tools/changed_tests.py``: tests that can see what has changed, and no others."""

from __future__ import annotations

import pytest

from tests.helpers.paths import REPOSITORY
from tools import changed_tests

# imports little
PLAIN = "tests/unit/calibration/test_metrics.py"


@pytest.mark.parametrize(
    ("changed", "seen"),
    [
        # imported, also from within a function; by the command line, which makes names of its verbs
        ("megatron_dcpo/calibration/diagrams.py", "unit/evaluation/test_report"),
        ("megatron_dcpo/cli/train.py", "system/test_training"),
        ("megatron_dcpo/policy/batching.py", "distributed/test_grid"),
        # a case that a worker imports by its name, a module that a process runs
        ("tests/distributed/cases/grid.py", "distributed/test_grid"),
        ("tests/helpers/signalled.py", "system/test_signals"),
        # scripts and files that are named by their paths
        ("tools/gpu_check.sh", "extras/tools/test_gpu_check"),
        ("examples/smollm2/tasks.py", "extras/examples/test_smollm2_tasks"),
        ("lab/testgrid.py", "extras/lab/test_price"),
        ("docs/metrics.md", "system/test_training"),
        ("tests/sandbox/conftest.py", "sandbox/test_code"),
        # every file
        ("docs/metrics.md", "house/test_pins"),
    ],
)
def test_a_change_is_seen_where_it_can_be(changed: str, seen: str) -> None:
    assert (REPOSITORY / changed).is_file()
    assert changed_tests.sees(f"tests/{seen}.py", {changed})
    assert not changed_tests.sees(PLAIN, {changed})


def test_a_file_of_tests_sees_itself_and_what_all_run_with() -> None:
    for changed in (PLAIN, "pyproject.toml", "megatron_dcpo/calibration/metrics.py"):
        assert changed_tests.sees(PLAIN, {changed})
    assert not changed_tests.sees(PLAIN, set())


@pytest.mark.parametrize("changed", [None, {"pyproject.toml"}, set()])
def test_all_or_none(
    changed: set[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changed_tests, "changed_since", lambda revision: changed)
    assert changed_tests.main("HEAD", "tests/extras/tools") == 0
    listed = capsys.readouterr().out.split()
    assert ("tests/extras/tools/test_changed_tests.py" in listed) == (changed != set())


def test_a_revision_that_is_not_here_has_changed_everything() -> None:
    assert changed_tests.changed_since("0" * 40) is None
    assert isinstance(changed_tests.changed_since("HEAD"), set)
