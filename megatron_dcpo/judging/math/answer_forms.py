r"""Recognize answers whose form matters before their value does: numerals with a base, ratios,
brackets, plain numbers.

math-verify reads ``120_5`` as ``120``, a ratio of three as its first two parts, and ``(1, 2)`` as
``{1, 2}``. Here these forms differ, by rules that reject in case of doubt:

- a numeral with a base equals the same digits with the same base; ``_{10}`` changes nothing.
  ``120_5`` is neither ``120`` nor ``35``, because the base is part of the question;
- ratios are equal if they are proportional, ``3:4 = 6:8 = 3/4``; two clock times (``2:30``) must be
  the same time;
- a set in braces is not a tuple, a point or an interval.
"""

from __future__ import annotations

import re
import struct
from fractions import Fraction
from typing import NamedTuple

_NUMERAL = re.compile(r"\(?\s*([0-9A-F]+)\s*\)?\s*_\s*(?:\{\s*(.+?)\s*\}|([0-9]))")
_BASES = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
_BASE_NAMES = {name: base for base, name in enumerate(_BASES.split(), start=2)}
_RATIO_MARK = re.compile(
    r"\\colon(?![A-Za-z])|\\ratio(?![A-Za-z])|:|(?<=[0-9\s}])\\text\{\s*to\s*\}|(?<=[0-9]) to "
    r"(?=[0-9])"
)
_CLOCK = re.compile(r"(?:[01]?[0-9]|2[0-4]):[0-5][0-9]")
_DECIMAL = re.compile(r"([+-]?)\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_SIMPLE_FRACTION = re.compile(
    r"([+-]?)\s*(?:\\[dtc]?frac\s*\{\s*([+-]?[0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}|([0-9]+)\s*/\s*([0-9]+))"
)
_MIXED = re.compile(
    r"([+-]?)\s*([0-9]+)(?:\s+([1-9][0-9]*)\s*/\s*([0-9]+)"
    r"|(?:\s|~|\\[ ,;:!])*\\[dtc]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\})"
)
_SCIENTIFIC = re.compile(
    r"([+-]?)\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE]([+-]?[0-9]{1,3})"
    r"|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,4})\s*\}|([0-9])))"
)
_REPEATING = re.compile(
    r"([+-]?)\s*([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))"
)
_FLOAT_DIGITS = 15
_LARGEST_FLOAT = 10**38  # of 32 bits
# of a computation, as a part of its value: some units of the last place
_ERROR_64, _ERROR_32 = Fraction(1, 10**13), Fraction(2, 10**7)


class Numeral(NamedTuple):
    digits: str
    base: int


def numeral(text: str) -> Numeral | None:
    r"""Parse ``2516_8``, ``204_{5}``, ``AB_{16}``, ``12_{\text{five}}`` or ``(120)_5``; return None
    for anything else, such as ``x_1``.
    """
    match = _NUMERAL.fullmatch(text.strip())
    if match is None:
        return None
    name = re.sub(r"\\text|[{}()\s]", "", match[2] or match[3]).lower()
    name = name.removeprefix("base")
    if name.isdecimal() and len(name) <= 2:
        base = int(name)
    else:
        base = _BASE_NAMES.get(name, 0)
    digits = match[1].lstrip("0") or "0"
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in digits):
        return None
    if base <= 10 and not digits.isdecimal():
        return None
    return Numeral(digits, base)


def without_base_ten(text: str) -> str:
    """Return the plain number of a numeral marked as decimal, any other text unchanged."""
    number = numeral(text)
    return number.digits if number is not None and number.base == 10 else text


def ratio(text: str) -> tuple[str, ...] | None:
    """Return the parts of ``3:4:5``, or None. A colon within brackets does not mark a ratio."""
    if any(bracket in text for bracket in "([|<>=,"):
        return None
    parts = tuple(part.strip() for part in _RATIO_MARK.split(text))
    return parts if len(parts) > 1 and all(parts) else None


def is_clock(text: str) -> bool:
    return _CLOCK.fullmatch(text.strip()) is not None


def is_well_formed(text: str) -> bool:
    r"""Return whether braces match and no bare ``$`` stands between two digits.

    math-verify reads ``763}6`` up to the stray brace, as 763, and ``541$6`` without the dollar
    sign, as 5416.
    """
    if re.search(r"[0-9]\s*(?<!\\)\$\s*[0-9]", text):
        return False
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def is_braced_set(text: str) -> bool | None:
    r"""Return True for ``\{..\}``, False for a tuple, point or interval, and None for a text that
    is not a list in brackets.
    """
    bare = text.strip()
    if "," not in bare or _closes_early(bare):
        return None
    if bare.startswith(r"\{") and bare.endswith(r"\}"):
        return True
    if bare[0] in "([" and bare[-1] in ")]":
        return False
    return None


def _closes_early(text: str) -> bool:
    """Return whether the first bracket closes before the end, as in (1,2),(3,4), which is a list of
    two and not one tuple.
    """
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ")]}":
            return position + 1 < len(text)
    return False


def exact_number(text: str) -> Fraction | None:
    r"""Return the value of a plain number, None for everything else.

    Plain are integers, decimals (``1.5e3``, ``1.5\times 10^{3}`` and ``0.1\overline{6}`` too),
    ``a/b``, ``\frac{a}{b}``, ``1 1/2`` and ``1\frac{1}{2}``.
    """
    text = text.strip()
    if len(text) > 200:
        return None
    if match := _DECIMAL.fullmatch(text):
        value: Fraction | None = Fraction(match[2])
    elif match := _SIMPLE_FRACTION.fullmatch(text):
        value = _fraction(match[2] or match[4], match[3] or match[5])
    elif match := _MIXED.fullmatch(text):
        part = _fraction(match[3] or match[5], match[4] or match[6])
        value = None if part is None or part >= 1 else int(match[2]) + part
    elif match := _SCIENTIFIC.fullmatch(text):
        value = Fraction(match[2]) * Fraction(10) ** _exponent(match)
    elif match := _REPEATING.fullmatch(text):
        period = match[4] or match[5]
        digits = Fraction(int(period), 10 ** len(period) - 1) / 10 ** len(match[3])
        value = Fraction(f"{match[2] or 0}.{match[3] or 0}") + digits
    else:
        return None
    return -value if value is not None and match[1] == "-" else value


def last_place(text: str) -> Fraction | None:
    r"""Return what a unit of the last digit of a decimal is worth: ``0.01`` for ``6.88``, ``1e-9``
    for ``6.88\times 10^{-7}``. None for any number that is written without a decimal point, which
    is exact, and for everything else.
    """
    text = text.strip()
    exponent = 0
    if match := _SCIENTIFIC.fullmatch(text):
        exponent = _exponent(match)
    else:
        match = _DECIMAL.fullmatch(text)
    if match is None or "." not in match[2]:
        return None
    places = len(match[2].partition(".")[2])
    return Fraction(10) ** (exponent - places)


def is_float(text: str, value: Fraction) -> bool:
    """Return whether a decimal has so many digits as only a floating-point computation writes: 15
    significant ones or more. Its last digits are noise: ``0.30000000000000004`` stands for .3.
    """
    return _significant_digits(text) >= _FLOAT_DIGITS and abs(value) < _LARGEST_FLOAT


def same_float(left: Fraction, right: Fraction, text: str) -> bool:
    """Return whether two values are equal but for the rounding of a computation with 64 bits if
    ``text``, which ``right`` is written as, :func:`is_float`; with 32 bits if it is one of their
    values (``0.10000000149011612`` is .1), or as such a value is printed (``2.1999998`` is 2.2).
    """
    if _is_printed_in_32_bits(text, right):
        error = _ERROR_32
    elif not is_float(text, right):
        return False
    else:
        error = _ERROR_32 if _in_32_bits(right) == float(right) else _ERROR_64
    return abs(left - right) <= error * abs(right)


def _is_printed_in_32_bits(text: str, value: Fraction) -> bool:
    """Return whether a decimal has the 8 or 9 significant digits that a number of 32 bits needs to
    be printed, and is its shortest print.
    """
    digits = _significant_digits(text)
    if digits not in (8, 9) or not abs(value) < _LARGEST_FLOAT:
        return False
    nearest = _in_32_bits(value)
    shorter = _in_32_bits(Fraction(f"{nearest:.{digits - 1}g}"))
    return shorter != nearest and Fraction(f"{nearest:.{digits}g}") == value


def _in_32_bits(value: Fraction) -> float:
    number: float = struct.unpack("f", struct.pack("f", float(value)))[0]
    return number


def _significant_digits(text: str) -> int:
    """Return the number of significant digits of a decimal, 0 for any other text."""
    match = _SCIENTIFIC.fullmatch(text.strip()) or _DECIMAL.fullmatch(text.strip())
    if match is None or "." not in match[2]:
        return 0
    return len(match[2].replace(".", "").lstrip("0"))


def _exponent(scientific: re.Match[str]) -> int:
    return int(scientific[3] or scientific[4] or scientific[5])


def _fraction(top: str, bottom: str) -> Fraction | None:
    return Fraction(int(top), int(bottom)) if int(bottom) else None
