"""Which rows may be programming problems: only for these ``code_problems.py`` is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# DeepCoder, AceCoder, OpenCodeInstruct, APPS and TACO, open-r1's Codeforces
TEST_COLUMNS = ("tests", "test_cases", "unit_tests", "input_output", "official_tests")
# of the formats that have tests elsewhere
_OF_OTHER_FORMATS = (
    *("public_test_cases", "plus_input", "test_list", "test", "verification_info"),
    "reward_model",  # verl's, whose ground truth may be tests
)
_SIGNS = frozenset({*TEST_COLUMNS, *_OF_OTHER_FORMATS})


class OtherLanguage(Exception):
    """The tests of a row are for programs in a language other than Python."""


class Untested(Exception):
    """The tests of the row (its name is the argument) pass for any program."""


def may_have_tests(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a column of tests, or assertions where others have an answer."""
    if not _SIGNS.isdisjoint(row):
        return True
    answers = (row.get(name) for name in ("ground_truth", "answer", "final_answer"))
    return any(isinstance(one, str | list | tuple) and "assert" in str(one) for one in answers)
