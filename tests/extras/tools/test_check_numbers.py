"""``tools/check_numbers.py``: a number that is not the record's is named."""

from __future__ import annotations

import runpy

from tests.helpers.paths import REPOSITORY

CHECK = runpy.run_path(str(REPOSITORY / "tools" / "check_numbers.py"))
QUOTES = (REPOSITORY / "tools" / "numbers.txt").read_text()


def problems(name: str, text: str) -> list[str]:
    entries = QUOTES.partition(f"page {name}\n")[2].partition("\npage ")[0].splitlines()
    return CHECK["check_page"](name, text, entries, REPOSITORY / "docs")


def test_what_is_wrong_is_named() -> None:
    text = (REPOSITORY / "docs" / "lab" / "README.md").read_text()
    (said,) = problems(
        "docs/lab/README.md", text.replace("**the run states .225**", "**the run states .252**")
    )
    assert "the run states .252" in said
    assert "0.225" in said
    (said,) = problems("docs/lab/README.md", text + "\nAnd 17 more.\n")
    assert "And 17 more" in said
    (said,) = problems("docs/lab/README.md", text.replace("for all 2,000", "for most"))
    assert "occurs 0 times" in said
