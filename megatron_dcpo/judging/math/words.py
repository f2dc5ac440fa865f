r"""Words in answers: units behind a number, every other word, and keys that are no mathematics.

math-verify drops what stands in ``\text{}`` and reads bare letters as products. Here a unit is one
of a list, or the plural of a thing that is counted; any other word (``million``, ``p.m.``,
``north``) counts, in ``\text{}`` or bare, so that an answer with it equals only an answer with it.
A key that is a word, a truth value, a date or a span of numbers equals the same one alone.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron_dcpo.judging.abstention import normalize

# the spellings of each unit; the last may stand for any unit
_SPELLINGS = (
    *("mm millimeter millimetre", "cm centimeter centimetre", "meter metre"),
    *("km kilometer kilometre",),
    *("inch inches in", "foot feet ft", "yard yd", "mile mi", "nm nanometer", "lightyear"),
    *("gram", "kg kilogram kilo", "mg milligram", "pound lb lbs", "ounce oz", "ton tonne"),
    *("second sec", "ms millisecond", "minute min", "hour hr", "day", "week", "month", "year yr"),
    *("ml milliliter millilitre", "liter litre", "gallon gal", "quart", "pint", "cup", "cc"),
    *("dollar usd", "cent", "euro eur", "rupee", "yuan", "yen"),
    *("degree deg", "radian rad", "celsius", "fahrenheit", "kelvin"),
    *("joule kj", "newton", "watt kw", "volt", "amp ampere", "ohm", "pa pascal kpa", "hz hertz"),
    *("mph", "kmh kph", "mol mole", "calorie cal kcal", "bit", "byte", "acre", "people person"),
    *("child children", "man men", "woman women", "mouse mice", "tooth teeth", "sheep fish"),
    "unit st nd rd th",  # an ordinal number is the number
)
_LETTERS = {
    "m": "meter",
    "g": "gram",
    "s": "second",
    "h": "hour",
    "l": "liter",
    "L": "liter",
    "N": "newton",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "A": "amp",
    "K": "kelvin",
    "F": "fahrenheit",
    "C": "celsius",
}
_POWERS = {"square": "2", "sq": "2", "cubic": "3"}
# of numbers, also with an s: they are no plurals of things
_NUMBER_WORD = re.compile(
    r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty|hundred"
    r"|thousand|\w*illion|\w*illiard|dozen|score|gross|lakh|lac|crore|myriad|googol|pair|couple"
    r"|hal(?:f|ve)|quarter|third|\w+th|time|percent|ten|twent(?:y|ie)|\w+tie|sixe)s?"
)
_PLURAL = re.compile(r"[a-z]{2,}(?<![sui])s")  # and not loss, plus, axis
_NO_PLURALS = re.compile(r"\w+wards|minus|always|perhaps|afterwards|news|sometimes|less")
_SHORT = frozenset(("am", "pm", "ad", "bc", "ce", "bce", "lac"))  # bare, and no product

_TEXT = r"\\(?:text[a-z]*|mathrm|mbox|rm)\s*\{(?:[^{}]|\{[^{}]*\})*\}"
_SPACE = r"\s+|~|\\[ ,;:!]"
_PIECE = re.compile(
    rf"(?P<text>{_TEXT})|(?P<space>{_SPACE})|(?P<power>\^\s*(?:\{{\s*-?[1-3]\s*\}}|[1-3]))"
    r"|(?P<word>[A-Za-z](?:\.?[A-Za-z])*\.?)|(?P<per>/)|(?P<other>\\[A-Za-z]+|\\?.)",
    re.DOTALL,
)
_INNER = re.compile(r"\{(.*)\}", re.DOTALL)
_INNER_PIECE = re.compile(r"[A-Za-z](?:[.'-]?[A-Za-z])*|/|\^\s*\{?\s*-?[1-3]")
_LETTER = re.compile("[A-Za-z]")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SPOKEN = re.compile(r"\\(?:text|textbf|textit|textrm|mbox)\s*\{([^{}]*)\}")
# of the words between parts of an answer: they change no part
_SILENT = {
    *("all", "also", "an", "and", "any", "are", "both", "either", "for", "if", "is", "only", "or"),
    *("the", "to", "when", "where", "with"),
}

_ALONE = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]\.?")
_IN_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox)\s*\{([^{}]*)\}")
_NAMES = {
    *("infinity", "infty", "inf", "sqrt", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "log"),
    *("ln", "exp"),
}
_TRUTH = {"yes": "true", "true": "true", "no": "false", "false": "false"}
_SPAN = re.compile(r"[0-9]+(?:\s*-+\s*[0-9]+)+|[0-9]{1,4}(?:/[0-9]{1,4}){2}")
_TO = re.compile(r"\\text\{\s*to\s*\}|\bto\b|[\u2010-\u2015\u2212]")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = r"([A-Z][a-z]{2,8})\.?"
_DAY = r"([0-9]{1,2})(?:st|nd|rd|th)?"
_DATES = (
    (re.compile(r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})"), (0, 1, 2)),
    (re.compile(rf"{_MONTH}\s+{_DAY},?\s+([0-9]{{4}})"), (2, 0, 1)),
    (re.compile(rf"{_DAY}\s+{_MONTH},?\s+([0-9]{{4}})"), (2, 1, 0)),
)


def _units() -> dict[str, str]:
    """Return the unit of every spelling, also in the plural."""
    units: dict[str, str] = {}
    for row in _SPELLINGS:
        names = row.split()
        for spelling in names:
            units[spelling] = units[f"{spelling}s"] = names[0]
    return units


_UNITS = _units()


class Measured(NamedTuple):
    """An answer without the words behind it: the ``unit`` that they name, or the ``words`` if they
    say anything else; both are empty if there are none.
    """

    number: str
    unit: str = ""
    words: str = ""


def measured(text: str) -> Measured:
    """Split an answer into what stands before its last words, and these. Linear in the length."""
    pieces = list(_PIECE.finditer(text))
    words: list[str] = []
    power = ""
    is_bare = False
    start = len(pieces)
    for index in range(len(pieces) - 1, -1, -1):
        kind = pieces[index].lastgroup
        named: list[str] = []
        if kind == "power" and not power:
            power = pieces[index][0].strip("^{} \t")
        elif kind == "per" and words:
            words.insert(0, "per")
        elif kind != "space" and not (start == len(pieces) and pieces[index][0] in ".,"):
            named = _named_by(pieces, index, power)
            if not named:
                break
            is_bare = is_bare or kind == "word"
            words = named + words
            power = ""
            start = index
    while start and pieces[start - 1].lastgroup == "space":
        start -= 1
    number = "".join(piece[0] for piece in pieces[:start]).strip()
    if not words or not number or (is_bare and _LETTER.search(_COMMAND.sub("", number))):
        return Measured(text)
    if all(_is_unit(word) for word in words):
        return Measured(number, unit=_product(words))
    return Measured(number, words=" ".join(words))


def _named_by(pieces: list[re.Match[str]], index: int, power: str) -> list[str]:
    """Return the words of a piece (:func:`_named`), none if it is neither text nor a bare word."""
    piece = pieces[index]
    if piece.lastgroup == "text":
        inner = _INNER.search(piece[0])
        assert inner is not None, "the pattern has braces"
        return _named(inner[1], power, in_text=True)
    is_word = piece.lastgroup == "word" and _is_behind(pieces, index)
    return _named(piece[0], power, in_text=False) if is_word else []


def _is_behind(pieces: list[re.Match[str]], index: int) -> bool:
    """Return whether a bare word is apart from what is before it."""
    return index > 0 and pieces[index - 1].lastgroup in ("space", "per", "text")


def _named(inner: str, power: str, *, in_text: bool) -> list[str]:
    """Return the words of a piece in one spelling, the last with its power; none if they may be
    variables or a product of them.
    """
    words: list[str] = []
    square = ""
    for word in _INNER_PIECE.findall(inner):
        if word[0] == "^":
            if words:
                words[-1] += "^" + word.strip("^{ ")
            continue
        plain = _LETTERS.get(word, word) if in_text else word
        plain = "per" if plain == "/" else plain.lower().replace(".", "")
        plain = _UNITS.get(plain, plain)
        if plain in _POWERS:
            square = _POWERS[plain]
            continue
        is_product = not in_text and len(plain) < 4
        if len(plain) == 1 or (is_product and plain not in _UNITS and plain not in _SHORT):
            return []
        words.append(plain + (f"^{square}" if square else ""))
        square = ""
    if words and power:
        words[-1] += f"^{power}"
    return words


def _is_unit(word: str) -> bool:
    name = word.partition("^")[0]
    if name in _UNITS or name == "per":
        return True
    if _NUMBER_WORD.fullmatch(name) or _NO_PLURALS.fullmatch(name):
        return False
    return _PLURAL.fullmatch(name) is not None


def _product(words: list[str]) -> str:
    unit = " ".join(words)
    return "" if unit.startswith("unit") else unit


def differ(left: Measured, right: Measured) -> bool:
    """Return whether the words of two answers say that these are not the same, whatever their
    numbers are. A missing unit is forgiven.
    """
    if left.words != right.words:
        return True
    units = {_unit_of(left), _unit_of(right)} - {""}
    return len(units) > 1 or _spoken(left.number) != _spoken(right.number)


def _unit_of(answer: Measured) -> str:
    return answer.unit or ("dollar" if r"\$" in answer.number else "")


def _spoken(text: str) -> set[str]:
    r"""Return the words that stand in ``\text{}`` beside digits."""
    if not re.search("[0-9]", text):
        return set()
    words = re.findall("[a-z]{2,}", " ".join(_SPOKEN.findall(text)).lower())
    return {_UNITS.get(word, word) for word in words} - _SILENT


def same_name(answer: str, key: str) -> bool | None:
    """Return whether an answer is the same word, truth value, date or span as the key; None if the
    key, or else the answer, is none of these.
    """
    date = _date(key)
    if date is not None:
        return _date(answer) == date
    if is_span(key):
        return _span(answer) == _span(key)
    if not is_word(key):
        return normalize(answer) == normalize(key) if is_word(answer) else None
    said = normalize(answer)
    wanted = normalize(key)
    return _TRUTH.get(said, said) == _TRUTH.get(wanted, wanted)


def is_word(text: str) -> bool:
    """Return whether a text is a word or several, and no product of letters."""
    plain = _IN_TEXT.sub(r"\1", text).strip()
    if _ALONE.fullmatch(plain) is None or plain.lower() in _NAMES:
        return False
    if not _IN_TEXT.sub("", text).strip():
        return True
    if plain != text.strip():
        return False
    words = re.split("[ -]+", plain.rstrip("."))
    return any(_is_single_word(word) for word in words)


def _is_single_word(word: str) -> bool:
    if word.lower() in _TRUTH or re.fullmatch("[A-Z][a-z]+", word):
        return True
    is_alphabet = list(word) == sorted(set(word))
    return len(word) > 3 and not is_alphabet and re.search("[aeiouyAEIOUY]", word) is not None


def is_date(text: str) -> bool:
    """Return whether a text is a date with day, month and year."""
    return _date(text) is not None


def is_span(text: str) -> bool:
    """Return whether a text is numbers that a hyphen joins, or three that slashes join."""
    return _span(text) is not None


def is_truth(text: str) -> bool:
    """Return whether a text is true, false, yes or no."""
    return normalize(text) in _TRUTH


def _span(text: str) -> tuple[str, ...] | None:
    plain = _TO.sub("-", text.strip())
    return tuple(re.split(r"\s*(?:-+|/)\s*", plain)) if _SPAN.fullmatch(plain) else None


def _date(text: str) -> tuple[int, int, int] | None:
    """Return year, month and day, None if a text is no date."""
    plain = _TO.sub("-", _IN_TEXT.sub(r"\1", text)).strip().rstrip(".")
    for pattern, order in _DATES:
        match = pattern.fullmatch(plain)
        if match is None:
            continue
        year, month, day = (match.groups()[place] for place in order)
        if month.isdecimal():
            number = int(month)
        elif month[:3].lower() in _MONTHS:
            number = _MONTHS.index(month[:3].lower()) + 1
        else:
            continue
        if 1 <= number <= 12 and 1 <= int(day) <= 31:
            return int(year), number, int(day)
    return None
