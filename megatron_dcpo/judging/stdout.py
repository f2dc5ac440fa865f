"""Is a program's output the expected one? As LiveCodeBench has it: line by line, first as text, then as numbers."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation


def same_output(output: str, expected: str, atol: float = 0.0) -> bool:
    """Lines are compared without white space at their ends, and without empty lines at the end of the text.

    A line that differs as text is right when both split into the same number of numerals that are pairwise equal as
    exact decimals (``1.50`` is ``1.5``, ``1e3`` is ``1000``), or within ``atol``, absolute or relative, where the
    tests state one.
    """
    lines, wanted = _lines(output), _lines(expected)
    if len(lines) != len(wanted):
        return False
    return all(line == want or _same_numbers(line, want, atol) for line, want in zip(lines, wanted, strict=True))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.rstrip().split("\n")]


def _same_numbers(line: str, want: str, atol: float) -> bool:
    tokens, wanted = line.split(), want.split()
    if len(tokens) != len(wanted) or not wanted:
        return False
    try:
        pairs = [(Decimal(token), Decimal(goal)) for token, goal in zip(tokens, wanted, strict=True)]
        return all(_close(value, goal, atol) for value, goal in pairs)
    except (InvalidOperation, ValueError, OverflowError):
        return False


def _close(value: Decimal, goal: Decimal, atol: float) -> bool:
    if value == goal:
        return True
    if not atol or not (value.is_finite() and goal.is_finite()):
        return False
    return abs(float(value) - float(goal)) <= atol * max(1.0, abs(float(goal)))
