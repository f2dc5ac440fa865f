"""The cases that ``make test`` runs try every family of attacks, every kind of tests and every way
a program can end.
"""

from __future__ import annotations

from tests.sandbox.attacks import ATTACKS
from tests.sandbox.conftest import SMOKE
from tests.sandbox.test_code import CASES
from tests.sandbox.test_costs import COSTLY


def test_every_family_of_attacks_and_every_end_of_them() -> None:
    def kinds(attacks: list) -> set:
        return {(attack.family, attack.kind, attack.expected) for attack in attacks}

    assert SMOKE["test_attack"] <= {attack.name for attack in ATTACKS}
    assert kinds([attack for attack in ATTACKS if attack.name in SMOKE["test_attack"]]) == kinds(
        ATTACKS
    )


def test_every_kind_of_tests_and_every_category() -> None:
    chosen = [CASES[name] for name in SMOKE["test_category"]]
    for what in (lambda case: case[1]["kind"], lambda case: case[2]):
        assert {what(case) for case in chosen} == {what(case) for case in CASES.values()}
    assert SMOKE["test_no_program_costs_more_than_its_limits"] <= set(COSTLY)
