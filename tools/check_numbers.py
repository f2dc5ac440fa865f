"""Compare the numbers of ``docs/lab``'s pages and of README's section on what was found with the
records (``make lint``).

``tools/numbers.txt`` quotes the pages: ``page PATH``, then entries ``quote`` or ``quote => source +
source``. In a quote with sources every ``#`` stands for a number of the page, in order. A source is
a path in a JSON file, as in ``theory.json drift/stable/0``, or cells of a table, ``test_tables.md
HEADING / BEGIN OF THE TEXT ABOVE | ROW | COLUMN; COLUMN``, with all their numbers; behind ``abs``
without their sign, behind ``first`` the first number of each cell alone. A quote without sources
stands for itself: settings, and under ``from the referee`` or ``not recorded`` what no record has.
No number of a page may be left over between the comments ``<!-- records from here on -->`` (or the
page's begin) and ``<!-- no records from here on -->``.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"[-+]?(?:\d[\d,]*)?\.?\d+"
LOOSE = re.compile(rf"(?<![\w.,@])(?<!\d ){NUMBER}(?![\w@]|[.,]\d)")
NEXT_SOURCE = re.compile(r" \+ (?=(?:abs |first )?[\w/]+\.(?:json|md) )")  # rows have a + too
TITLES = ("settings", "from the referee", "not recorded")
Table = tuple[str, dict[str, dict[str, str]]]  # "heading / text above", {row: {column: cell}}


def main() -> int:
    """Check every page; return 1 where something differs."""
    problems = []
    for part in re.split(
        r"^page ", (ROOT / "tools" / "numbers.txt").read_text(), flags=re.MULTILINE
    )[1:]:
        name, _, entries = part.partition("\n")
        problems += check_page(name, (ROOT / name).read_text(), entries.splitlines(), ROOT / "docs")
    print("\n".join(problems), end="\n" if problems else "")
    return int(bool(problems))


def check_page(name: str, text: str, entries: list[str], records: Path) -> list[str]:
    """Return what is wrong on one page: quotes that are not there, numbers that differ, numbers
    that no quote covers.
    """
    if "<!-- quickstart table -->" in text:
        text = text.partition("<!-- quickstart table -->")[2].partition("\n\n")[0]
    text = text.partition("<!-- records from here on -->")[2] or text
    text = text.partition("<!-- no records from here on -->")[0]
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    text = " ".join(
        re.sub(r"`[^`]*`|\]\([^)]*\)|^#.*$|^\d+\.|\(\d\)", " ", text, flags=re.MULTILINE).split()
    )
    problems = []
    for entry in entries:
        quote, _, sources = (piece.strip() for piece in entry.partition(" => "))
        if not quote or quote in TITLES:
            continue
        pattern = re.escape(quote).replace(r"\#", f"({NUMBER})") if sources else re.escape(quote)
        found = list(re.finditer(rf"(?<![\w.]){pattern}(?!\w|\.\d)", text))
        if not found or (sources and len(found) > 1):
            problems.append(f"{name}: {quote!r} occurs {len(found)} times")
        for match in reversed(found):
            if sources:
                shown = list(match.groups())
                expected = [
                    number
                    for source in NEXT_SOURCE.split(sources)
                    for number in values(source.strip(), records)
                ]
                if len(shown) != len(expected) or not all(map(same, shown, expected)):
                    problems.append(f"{name}: {match.group()!r}: the records have {expected}")
            text = text[: match.start()] + re.sub(r"\d", "", quote) + text[match.end() :]
    left = [text[max(match.start() - 30, 0) : match.end() + 10] for match in LOOSE.finditer(text)]
    return problems + [
        f"{name}: a number that no quote of tools/numbers.txt covers: ...{around}..."
        for around in left
    ]


def same(shown: str, expected: float) -> bool:
    """Return whether the page's number is the record's, rounded to its digits."""
    digits = len(shown.partition(".")[2])
    return abs(float(shown.replace(",", "")) - expected) <= 0.5 * 10**-digits + 1e-9


def values(source: str, records: Path) -> list[float]:
    """Return the numbers of a source."""
    first = source.startswith("first ")
    file, _, where = source.removeprefix("first ").removeprefix("abs ").partition(" ")
    path = next(path for path in (records / file, records / "lab" / file) if path.is_file())
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        for key in where.split("/"):
            value = value[int(key)] if isinstance(value, list) else value[key]
        numbers = [float(value)]
    else:
        above, row, columns = (piece.strip() for piece in where.split(" | "))
        cells = next(
            rows
            for title, rows in tables(path.read_text())
            if title.startswith(above) and row in rows
        )[row]
        numbers = [
            float(n)
            for column in columns.split("; ")
            for n in re.findall(NUMBER, cells[column])[: 1 if first else None]
        ]
    return [abs(number) for number in numbers] if source.startswith("abs ") else numbers


@functools.cache
def tables(text: str) -> list[Table]:
    """Return the tables of a page; a row whose title was there before has its first cell behind it
    (``GRPO 2``).
    """
    found: list[Table] = []
    heading, above = "", ""
    for block in text.split("\n\n"):
        lines = block.strip().splitlines()
        if block.startswith("#"):
            heading, above = lines[0].strip("# "), ""
        elif not block.startswith("|"):
            above = " ".join(lines)
        else:
            grid = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
            rows: dict[str, dict[str, str]] = {}
            for title, *cells in grid[2:]:
                key = f"{title} {cells[0]}" if title in rows else title
                rows[key] = dict(zip(grid[0][1:], cells, strict=True))
            found.append((f"{heading} / {above}", rows))
    return found


if __name__ == "__main__":
    sys.exit(main())
