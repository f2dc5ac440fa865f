"""Questions with options, or with a text as answer, in the formats of the public sets.

| set | columns | answer |
|---|---|---|
| GPQA | ``Question``, ``Correct Answer``, ``Incorrect Answer 1`` to ``3`` | a letter; the options
are shuffled |
| MMLU-Pro | ``question``, ``options``, ``answer`` (a letter), ``answer_index``, ``category`` | a
letter |
| TriviaQA | ``question``, ``answer`` with ``value`` and ``aliases`` (or capitalized) | any of these
texts |
| any other with options | ``options.py`` | a letter |
| HotpotQA | ``question``, ``answer``, ``supporting_facts``; ``context`` is left out | the text |
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_dcpo.data.question_options import Options, options_of, right_option, shows_options
from megatron_dcpo.data.row_files import Row
from megatron_dcpo.errors import UserError

SHUFFLE_SEED = 0  # of the order of GPQA's options, which have the right one first
CORRECT, INCORRECT = ("Correct Answer", tuple(f"Incorrect Answer {number}" for number in (1, 2, 3)))
_ASKED = ("problem", "question", "Question", "question_stem", "Problem", "prompt")
_ALIASES = (
    "value",
    "aliases",
    "normalizedaliases",
    "humananswers",
)  # of an answer of TriviaQA, without underscores


class Question(NamedTuple):
    """A question as a policy reads it, with its options; the ``answer`` to show; its ``form``
    (``prompts.ASKS``); the ``columns`` that a verifier reads; its ``kind``.
    """

    text: str
    answer: str
    form: str
    columns: Row
    kind: str | None = None


def question_of(row: Row, index: int, where: str, strict: bool = True) -> Question | None:
    """Return the question of a row in one of the formats, None for any other row. ``index`` of the
    row decides the order of the options that are shuffled.

    Raises :class:`UserError` for a row of a format that cannot be read as one; options that are not
    understood only if ``strict``, since a user's verifier may know what they are.
    """
    if CORRECT in row or INCORRECT[0] in row:
        return _gpqa(row, index, where)
    answer = row.get("answer", row.get("Answer"))
    asked = next((name for name in _ASKED if isinstance(row.get(name), str)), "question")
    choice = _choice_of_row(row, asked, where, strict)
    if choice is not None:
        return choice
    if isinstance(answer, Mapping) and any(_plain(name) in _ALIASES for name in answer):
        return _short(_text(row, asked, where), answer, where)
    if "supporting_facts" in row and "answer" in row:
        return _short(_text(row, asked, where), answer, where)
    return None


def accepted_texts(answer: object) -> list[str]:
    """Return the texts that answer a question: a text, the texts of a list, the value and aliases
    of an object of TriviaQA; each once, none of them empty.
    """
    if isinstance(answer, Mapping):
        fields = {_plain(str(name)): value for name, value in answer.items()}
        answer = [text for name in _ALIASES for text in _listed(fields.get(name))]
    texts = (str(text).strip() for text in _listed(answer) if isinstance(text, str | int | float))
    return list(dict.fromkeys(text for text in texts if text))


def letter_index(letter: object) -> int | None:
    """Return 0 for A, 1 for B, ...; None for what is no capital letter."""
    found = (
        string.ascii_uppercase.find(letter.strip())
        if isinstance(letter, str) and len(letter.strip()) == 1
        else -1
    )
    return found if found >= 0 else None


def _gpqa(row: Row, index: int, where: str) -> Question:
    options = [_text(row, column, where) for column in (CORRECT, *INCORRECT)]
    order = np.random.default_rng([SHUFFLE_SEED, index]).permutation(len(options))
    right = order.tolist().index(0)
    return _choice(_text(row, "Question", where), [options[i] for i in order], right, row, where)


def _choice(question: str, options: Sequence[Any], right: int, row: Row, where: str) -> Question:
    if len(options) > len(string.ascii_uppercase):
        raise UserError(
            f"{where}: {len(options)} options; expected at most {len(string.ascii_uppercase)}"
        )
    if odd := [option for option in options if not isinstance(option, str | int | float)]:
        raise UserError(f"{where}: an option must be a text, got {odd[0]!r:.60}")
    texts = [str(option).strip() for option in options]
    letter = string.ascii_uppercase[right]
    listed = "\n".join(
        f"{name}. {text}" for name, text in zip(string.ascii_uppercase, texts, strict=False)
    )
    kind = row.get("category", row.get("Subdomain"))
    columns = {"answer": letter, "options": texts}
    text = f"{question}\n\n{listed}"
    if shows_options(question, Options(texts, [])):
        text = question
    return Question(text, letter, "choice", columns, kind if isinstance(kind, str) else None)


def _choice_of_row(row: Row, asked: str, where: str, strict: bool) -> Question | None:
    """Return the question of a row with options, which are shown after it; None if it has none."""
    try:
        options = options_of(row, where)
        if options is None:
            return None
        messages = row.get("prompt")
        if asked == "question" and isinstance(messages, list | tuple):
            if _last_text_shows(messages, options):
                return None
            raise UserError(
                f"{where}: the prompt does not show its {len(options.texts)} options; give it as "
                "a text, to which they are added"
            )
        right = right_option(row, options, where)
    except UserError:
        if strict:
            raise
        return None
    stem = row.get("question")
    text = _text(stem, "stem", where) if isinstance(stem, Mapping) else ""
    return _choice(text or _text(row, asked, where), options.texts, right, row, where)


def _last_text_shows(messages: Sequence[Any], options: Options) -> bool:
    last = messages[-1] if messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return isinstance(content, str) and shows_options(content, options)


def _short(question: str, answer: object, where: str) -> Question:
    texts = accepted_texts(answer)
    if not texts:
        raise UserError(f"{where}: the answer has no text and no alias that is one")
    return Question(question, texts[0], "short", {"answer": answer})


def _text(row: Row, column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        what = "no text in" if column in row and value is not None else "no"
        raise UserError(
            f"{where} has {what} column {column!r}; found {', '.join(map(str, row)) or 'nothing'}"
        )
    return value.strip()


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _listed(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
