"""Mark as ``full`` what ``make test`` leaves out and ``make test-sandbox`` runs: all but a case of
each kind.

``tests/sandbox/test_smoke.py`` holds that the cases named here try every family of attacks and
every kind of tests.
"""

from __future__ import annotations

import pytest

# tests by name, and of each the cases that make test runs
SMOKE = {
    "test_attack": {
        "fork_bomb",
        "infinite_loop",
        "memory_bomb",
        "disk_filler",
        "output_flood_raw",
        "tcp",
        "socket_by_system_call",
        "secret_file",
        "environment",
        "write_host_folder",
        "kill_judge",
        "namespaces",
        "category_by_exit_status",
        "equals_everything",
        "forged_verdict",
    },
    "test_category": {
        "stdin",
        "first only",
        "raises",
        "out of memory",
        "scratch file",
        "check",
        "asserts",
        "function",
    },
    "test_no_program_costs_more_than_its_limits": {"feigned death", "colliding set"},
    "test_a_dead_server_is_replaced_and_its_program_judged_again": {"program"},
    "test_humaneval_plus": set(),
    "test_a_server_killed_in_the_middle_is_replaced": set(),
    "test_submit_returns_before_the_verdict": set(),
    "test_a_killed_judge_leaves_nothing": set(),  # test_programs_end_with_a_killed_judge is run
    "test_memory_of_the_judge_is_bounded": set(),
    "test_a_program_is_in_its_group_and_the_group_goes_with_it": set(),
}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "sandbox" and isinstance(item, pytest.Function):
            cases = SMOKE.get(item.originalname)
            if cases is not None and not cases & case_names(item):
                item.add_marker(pytest.mark.full)


def case_names(item: pytest.Function) -> set[str]:
    """Return the parameters of a case as words, attacks by their names."""
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {str(getattr(value, "name", value)) for value in parameters}
