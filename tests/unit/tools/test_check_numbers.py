"""``tools/check_numbers.py``: the pages agree with the records, and a digit that is changed is
noticed.
"""

from __future__ import annotations

import re
import runpy

import pytest

from tests.helpers.paths import REPOSITORY

CHECK = runpy.run_path(str(REPOSITORY / "tools" / "check_numbers.py"))
QUOTES = (REPOSITORY / "tools" / "numbers.txt").read_text()
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|^#[^\n]*$|^\d\.|\(\d\)", re.DOTALL | re.MULTILINE)


def problems(name: str, text: str) -> list[str]:
    entries = QUOTES.partition(f"page {name}\n")[2].partition("\npage ")[0].splitlines()
    return CHECK["check_page"](name, text, entries, REPOSITORY / "docs")


@pytest.mark.parametrize("name", ["docs/lab/README.md", "docs/lab/real_model.md", "README.md"])
def test_every_digit_counts(name: str) -> None:
    """All digits of the README's table, every eleventh of the lab's page; of words such as L1 and
    2x2 none.
    """
    text = (REPOSITORY / name).read_text()
    assert problems(name, text) == []
    begin = text.index("<!-- quickstart table -->") if name == "README.md" else 0
    end = len(text.partition("<!-- no records from here on -->")[0])
    if begin:
        end = text.index("\n\n", begin)
    left_out = {i for match in CODE.finditer(text) for i in range(*match.span())}
    places = [
        m.start()
        for m in re.finditer(r"(?<![A-Za-z@x])\d(?![A-Za-z])", text)
        if begin <= m.start() < end
    ]
    places = [
        i
        for i in places
        if i not in left_out and not re.search(r"[A-Z]\d*$|80ba0e?$|18b5f?$", text[i - 6 : i])
    ]
    assert len(places) > 100
    for i in places[:: 1 if begin else 11]:
        changed = text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1 :]
        assert problems(name, changed), text[max(0, i - 30) : i + 10]


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
