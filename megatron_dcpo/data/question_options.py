"""The options of a question in the forms of public data sets, and which of them is right.

| form | sets |
|---|---|
| ``options`` or ``choices``: a list of texts | MMLU-Pro, MMLU, AQuA (``A)21``) |
| the same as an object from letter to text | MedQA |
| the same as one text, ``A. 3`` a line or in a row | MathQA |
| ``choices``: ``text`` and ``label`` as lists, or objects with both | ARC, CommonsenseQA |
| a column for each letter, ``A`` to ``D``, or ``opa`` to ``opd`` | MMLU's tables, MedMCQA |

A list or an object may also be JSON text, as tables of CSV have it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_dcpo.data.row_files import Row
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import parse_json

LETTERS = string.ascii_uppercase
COLUMNS = ("options", "choices")
# Columns that say which option is right, in the order in which they are asked; the last ones, which
# may be about something else, only if no other says it.
INDEX_COLUMNS = ("answer_index", "answer_idx", "cop")
_FIRST_KEYS = (*INDEX_COLUMNS, "answerKey", "answer", "Answer")
_LAST_KEYS = ("correct", "label")
KEY_COLUMNS = (*_FIRST_KEYS, *_LAST_KEYS)
FORMS = (
    "a list of texts, an object from letter to text, a text with the lines A. … B. …, or "
    "text and label as lists; and which one is right as letter, index from 0 or text in one of "
    f"{', '.join(KEY_COLUMNS)}"
)
_LETTER_COLUMNS = (tuple("ABCDEFGHIJ"), ("opa", "opb", "opc", "opd", "ope"))
_PREFIX = re.compile(r"\s*\(?([A-Za-z])\s*[).:]\s*")


class Options(NamedTuple):
    """The options of a question in order, and the labels by which its key names them."""

    texts: list[str]
    labels: list[str]


def options_of(row: Row, where: str) -> Options | None:
    """Return the options of a row, None if it has none. Raises :class:`UserError`, which names the
    row and the forms that are known, for options of another form.
    """
    for column in COLUMNS:
        value = row.get(column)
        if value is not None and value not in ("", [], {}):
            return _read(value, f"{where}: {column}")
    question = row.get("question")
    if isinstance(question, Mapping) and question.get("choices"):
        return _read(question["choices"], f"{where}: question.choices")
    for names in _LETTER_COLUMNS:
        present = [name for name in names if _is_text(row.get(name))]
        labels = list(LETTERS[: len(present)])
        if len(present) < 2 or present != list(names[: len(present)]):
            continue
        if names[0] == "opa" or any(row.get(key) in labels for key in KEY_COLUMNS):
            return _checked([row[name] for name in present], labels, where)
    return None


def right_option(row: Row, options: Options, where: str) -> int:
    """Return the place of the right option. Raises :class:`UserError` if no column says it, or if
    two columns name different ones.
    """
    found: dict[str, int] = {}
    unclear: list[str] = []
    for column in KEY_COLUMNS:
        value = row.get(column)
        if value is None or value == "" or (found and column in _LAST_KEYS):
            continue
        place = _place(column, value, options)
        if place is not None:
            found[column] = place
        elif column in _FIRST_KEYS:
            unclear.append(f"{column} {value!r:.40}")
    if unclear and not (found and _is_free_text(row, unclear)):
        raise UserError(f"{where}: {unclear[0]} is none of its {len(options.texts)} options")
    if not found:
        raise UserError(
            f"{where}: no column says which of the {len(options.texts)} options is right; expected "
            f"a letter, an index from 0 or the text of one in {', '.join(KEY_COLUMNS)}"
        )
    first = next(iter(found))
    for other in found:
        if found[other] != found[first]:
            raise UserError(
                f"{where}: {other} {row[other]!r:.40} and {first} {row[first]!r:.40} are two "
                "options"
            )
    return found[first]


def shows_options(text: str, options: Options) -> bool:
    """Return whether a question lists its options already."""
    if not all(option in text for option in options.texts):
        return False
    at = 0
    for number, option in enumerate(options.texts):
        listed = re.compile(
            rf"(?:^|[\s(]){LETTERS[number]}\s*[).:]\s*{re.escape(option)}", re.IGNORECASE
        )
        match = listed.search(text, at)
        if match is None:
            return False
        at = match.end()
    return True


def _place(column: str, value: object, options: Options) -> int | None:
    """Return the place of the option that a value names by its label, index or text."""
    count = len(options.texts)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # of a column in which other rows have none
    if isinstance(value, int) and not isinstance(value, bool):
        if str(value) in options.labels:
            return options.labels.index(str(value))
        return value if 0 <= value < count else None
    if not isinstance(value, str):
        return None
    text = value.strip()
    if text.upper() in options.labels:
        return options.labels.index(text.upper())
    if column in INDEX_COLUMNS:
        return None
    same = [place for place, option in enumerate(options.texts) if option == text]
    return same[0] if len(same) == 1 else None


def _is_free_text(row: Row, unclear: Sequence[str]) -> bool:
    """Return whether all that names no option is an ``answer`` in other words than its option's,
    beside a column that names one.
    """
    answer = row.get("answer")
    is_words = isinstance(answer, str) and len(answer.strip()) > 1
    return is_words and unclear == [f"answer {answer!r:.40}"]


def _read(value: object, where: str) -> Options:
    if isinstance(value, str):
        value = _from_text(value)
    if isinstance(value, Mapping) and {"text", "label"} <= value.keys():
        texts, labels = value["text"], value["label"]
        if not isinstance(texts, list) or not isinstance(labels, list):
            raise _not_understood(value, where)
        return _checked(texts, labels, where)
    if isinstance(value, Mapping):
        # of a parquet file: the letters that other rows have are None here
        items = [(name, text) for name, text in value.items() if text is not None]
        items.sort(key=lambda item: str(item[0]))
        return _checked([text for _, text in items], [name for name, _ in items], where)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, Mapping) and {"text", "label"} <= item.keys() for item in value):
            texts = [item["text"] for item in value]
            return _checked(texts, [item["label"] for item in value], where)
        return _checked(_without_prefixes(value), [*LETTERS[: len(value)]], where)
    raise _not_understood(value, where)


def _checked(texts: Sequence[object], labels: Sequence[object], where: str) -> Options:
    """Return the options, which are texts or numbers, under labels that are letters or numbers."""
    row = where.rpartition(": ")[0] if where.endswith(("options", "choices")) else where
    if len(texts) > len(LETTERS):
        raise UserError(f"{row}: {len(texts)} options; expected at most {len(LETTERS)}")
    for text in texts:
        if not isinstance(text, str | int | float) or isinstance(text, bool):
            raise UserError(f"{row}: an option must be a text, got {text!r:.60}")
    names = [str(label).strip().upper() for label in labels]
    is_named = all(re.fullmatch(r"[A-Z]|\d{1,2}", name) for name in names)
    if len(names) != len(texts) or not is_named or len(set(names)) != len(names):
        raise _not_understood(dict(zip(names, texts, strict=False)), where)
    return Options([str(text).strip() for text in texts], names)


def _without_prefixes(items: Sequence[object]) -> list[object]:
    """Return the texts of options without their letters, if each begins with its own."""
    texts: list[object] = []
    for number, item in enumerate(items):
        match = _PREFIX.match(item) if isinstance(item, str) else None
        if number >= len(LETTERS) or match is None or match[1].upper() != LETTERS[number]:
            return list(items)
        texts.append(str(item)[match.end() :])
    return texts if len(texts) > 1 else list(items)


def _from_text(text: str) -> object:
    """Return the list or the object in a JSON text, the options ``A. … B. …`` in any other, and the
    text itself if it has none.
    """
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return parse_json(text)
        except ValueError:
            pass
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and _without_prefixes(lines) != lines:
        return lines
    parts = []
    at = 0
    for number in range(len(LETTERS)):
        start = _opening(text, number, at)
        if start is None:
            break
        if number:
            parts.append(text[at : start.start()].strip().rstrip(",;").strip())
        elif text[: start.start()].strip():
            return text
        at = start.end()
    parts.append(text[at:].strip())
    return parts if len(parts) > 1 and all(parts) else text


def _opening(text: str, number: int, at: int) -> re.Match[str] | None:
    """Return the next place where an option begins with its letter: ``B.``, ``b )``, ``(B)``."""
    opening = re.compile(rf"(?:^|(?<=[\s,;]))\(?{LETTERS[number]}\s*[).:]\s*", re.IGNORECASE)
    return opening.search(text, at)


def _is_text(value: object) -> bool:
    return isinstance(value, str | int | float) and str(value).strip() != ""


def _not_understood(value: object, where: str) -> UserError:
    return UserError(f"{where} {value!r:.80} is not understood; expected {FORMS}")
