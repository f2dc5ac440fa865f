"""Mark as ``extras`` what ``make test`` leaves out and ``make test-extras`` runs: tests of what
stands beside the package, all but a few of each folder.
"""

from __future__ import annotations

import pytest

FOLDER = "tests/extras/"
# what make test runs: each folder imports, and does a little
SMOKE = {
    "benchmarks/test_async_step.py",
    "examples/test_quickstart.py::test_an_adapter_and_further_steps_of_it",
    "examples/test_rows.py",
    "lab/test_equal_data.py",
    "lab/test_world2.py::test_cells_use_the_second_worlds_problems_and_recipe",
    "tools/test_options_page.py",
}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(FOLDER):
            file, _, test = item.nodeid.removeprefix(FOLDER).partition("::")
            if not SMOKE & {file, f"{file}::{test.partition('[')[0]}"}:
                item.add_marker(pytest.mark.extras)
