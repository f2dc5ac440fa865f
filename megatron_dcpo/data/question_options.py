"""The options of a question, which of them is right, and how they are shown. Options are a list of
texts, or an object from letter to text, also as JSON text.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_dcpo.data.chats import is_empty, parsed_text
from megatron_dcpo.errors import UserError

LETTERS = string.ascii_uppercase


class Options(NamedTuple):
    """The options of a question in order, and the labels by which its key names them."""

    texts: list[str]
    labels: list[str]


def options_of(value: object, where: str) -> Options | None:
    """Return the options in a value of a row, None for an empty one. Raises :class:`UserError`,
    which names the row, for options of another form.
    """
    if isinstance(value, str):
        value = parsed_text(value)
    if is_empty(value):
        return None
    if isinstance(value, Mapping):
        # of a parquet file: the letters that other rows have are None here
        items = sorted((str(name), text) for name, text in value.items() if text is not None)
        labels = [name.strip().upper() for name, _ in items]
        texts = [text for _, text in items]
        if not all(re.fullmatch(r"[A-Z]|\d{1,2}", label) for label in labels):
            raise _not_understood(value, where)
    elif isinstance(value, list | tuple):
        texts, labels = list(value), list(LETTERS[: len(value)])
    else:
        raise _not_understood(value, where)
    if len(texts) > len(LETTERS):
        raise UserError(f"{where}: {len(texts)} options; expected at most {len(LETTERS)}")
    for text in texts:
        if not isinstance(text, str | int | float) or isinstance(text, bool):
            raise UserError(f"{where}: an option must be a text, got {text!r:.60}")
    return Options([str(text).strip() for text in texts], labels)


def right_option(key: object, options: Options, where: str) -> int:
    """Return the place of the option that a key names by its letter, its index from 0, or its text.
    Raises :class:`UserError` if it names none.
    """
    count = len(options.texts)
    if isinstance(key, float) and key.is_integer():
        key = int(key)  # of a column in which other rows have none
    if isinstance(key, int) and not isinstance(key, bool):
        if str(key) in options.labels:
            return options.labels.index(str(key))
        if 0 <= key < count:
            return key
    elif isinstance(key, str):
        text = key.strip()
        if text.upper() in options.labels:
            return options.labels.index(text.upper())
        if options.texts.count(text) == 1:
            return options.texts.index(text)
    raise UserError(
        f"{where}: the answer {key!r:.40} is none of its {count} options; expected a letter, an "
        "index from 0 or the text of one"
    )


def letter_index(letter: object) -> int | None:
    """Return 0 for A, 1 for B, ...; None for what is no capital letter."""
    is_letter = isinstance(letter, str) and len(letter.strip()) == 1
    found = LETTERS.find(str(letter).strip()) if is_letter else -1
    return found if found >= 0 else None


def with_options(question: str, texts: Sequence[str]) -> str:
    """Return a question with its options below it, unless it lists them already."""
    if shows_options(question, texts):
        return question
    listed = "\n".join(f"{name}. {text}" for name, text in zip(LETTERS, texts, strict=False))
    return f"{question}\n\n{listed}"


def shows_options(text: str, options: Sequence[str]) -> bool:
    """Return whether a question lists its options already."""
    at = 0
    for letter, option in zip(LETTERS, options, strict=False):
        listed = re.compile(rf"(?:^|[\s(]){letter}\s*[).:]\s*{re.escape(option)}", re.IGNORECASE)
        match = listed.search(text, at)
        if match is None:
            return False
        at = match.end()
    return True


def _not_understood(value: object, where: str) -> UserError:
    return UserError(
        f"{where}: the options {value!r:.80} are not understood; expected a list of texts or an "
        "object from letter to text; read the rows by a function, data.row (examples/rows)"
    )
