"""The answer of a row: a text, a number, a list of texts of which each is right, an object of
TriviaQA (``value`` and ``aliases``), or one of these as JSON text or Python's repr.

What has another form is refused by name, because the text of a Python object is the answer to no
question.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import NamedTuple

from megatron_dcpo.data.chats import parsed_text
from megatron_dcpo.errors import UserError

# of an object of TriviaQA, in lower case and without underscores
_ACCEPTED = ("value", "aliases", "normalizedaliases", "humananswers")
# What data sets write where there is no answer; no answer equals it. Some problems have the answers
# "unknown", "undefined", "not given", "no solution", "[]" and "-".
_NO_ANSWERS = frozenset(
    {
        *("proof", "notfound", "not found", "not_found", "nan", "none", "null", "n/a", "#n/a"),
        *("<na>", "<null>", "<none>", "n.a", "?", "??", "???"),
        *("no answer", "no_answer", "noanswer", "not available", "not provided"),
        *("tbd", "todo", "\u2026", "see solution", "#value!", "#ref!", "#div/0!", "#name?"),
        *("no answer found", "no final answer", "answer not found", "none found"),
    }
)
_NOT_APPLICABLE = ("NA", "na")  # and not Na, which is sodium
_AROUND = re.compile(
    r"\\(?:boxed|text|textbf|mathrm|mbox)\s*\{(.*)\}|\$+(.*?)\$+|\*\*(.+)\*\*|\((.+)\)"
    r"|\"(.+)\"|'(.+)'",
    re.DOTALL,
)
_ASSERT = re.compile(r"\s*assert[\s(]")
_TEST_FIELDS = frozenset({"kind", "inputs", "functional", "test_cases"})
_BRACES = re.compile(r"\\boxed\{|[{}]")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class Answer(NamedTuple):
    """The ``texts`` that are right, of which the first is shown; none if the row has no answer.
    ``column`` is what the verifiers of questions read besides: all texts as a list if there are
    several, TriviaQA's object as it is, or else None.
    """

    texts: tuple[str, ...]
    column: object = None


def outcome_of(value: object, where: str) -> str:
    """Return the outcome of a forecast as the text of a number in [0, 1]. Raises
    :class:`UserError` for anything else.
    """
    words = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
    text = str(value).strip().lower()
    try:
        share = words[text] if text in words else float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise UserError(
            f"{where}: the outcome {value!r:.40} is neither true nor false nor a number from 0 to 1"
        )
    return str(share)


def answer_of(raw: object, where: str) -> Answer:
    """Return the answer in a value of a row. Raises :class:`UserError`, which names the row and the
    forms that are known, for a value of another form.
    """
    value = parsed(raw)
    if isinstance(value, Mapping):
        texts = accepted_texts(value)
        if not has_aliases(value):
            raise _not_understood(value, where)
        return Answer(tuple(texts), value)
    items = value if isinstance(value, list | tuple) else [value]
    texts = list(dict.fromkeys(text for text in (_text(one, where) for one in items) if text))
    return Answer(tuple(texts), texts if len(texts) > 1 else None)


def has_aliases(answer: object) -> bool:
    """Return whether an answer is an object of TriviaQA."""
    return isinstance(answer, Mapping) and any(_plain(name) in _ACCEPTED for name in answer)


def accepted_texts(answer: object) -> list[str]:
    """Return the texts that answer a question: a text, the texts of a list, the value and aliases
    of an object of TriviaQA; each once, none of them empty.
    """
    if isinstance(answer, Mapping):
        fields = {_plain(name): value for name, value in answer.items()}
        answer = [text for name in _ACCEPTED for text in _listed(fields.get(name))]
    texts = (str(text).strip() for text in _listed(answer) if isinstance(text, str | int | float))
    return list(dict.fromkeys(text for text in texts if text))


def final_answer(raw: object, integer: bool = False) -> str:
    r"""Return the answer key as text: GSM8K's part behind ``####`` without thousands commas, the
    last box of a worked solution, whole floats as integers.

    ``integer`` (AIME keys): leading zeros and a degree sign are notation: 025 -> 25, 336^\circ ->
    336.
    """
    if raw is None:
        return ""
    if isinstance(raw, float):
        return "" if raw != raw else str(int(raw)) if raw.is_integer() else repr(raw)
    text = str(raw).strip()
    if final := text.rsplit("\n", 1)[-1].partition("####")[2].strip():
        return _THOUSANDS.sub("", final)
    if boxed := last_box(text):
        return boxed
    if integer and (digits := re.fullmatch(r"(\d{1,1000})(?:\^\\circ|\^\{\\circ\})?", text)):
        return str(int(digits.group(1)))
    return text


def tests_in(key: object) -> object | None:
    """Return the tests that stand where an answer would: assertions (allenai's RLVR), or inputs and
    outputs of a program (verl). None for an answer.
    """
    if isinstance(key, str):
        if _ASSERT.match(key):
            return [key]
        if key.lstrip()[:1] not in ("[", "{"):
            return None
        key = parsed_text(key)
    if isinstance(key, Mapping):
        return None if _TEST_FIELDS.isdisjoint(key) else key
    if not isinstance(key, list | tuple) or not key:
        return None
    are_asserts = all(isinstance(one, str) and _ASSERT.match(one) for one in key)
    are_cases = all(isinstance(one, Mapping) and "output" in one for one in key)
    return list(key) if are_asserts or are_cases else None


def is_no_answer(text: str) -> bool:
    """Return whether a key only says that there is no answer (NuminaMath's ``proof`` and
    ``notfound``, ``nan`` of a table), in any case, also within a box.
    """
    for _ in range(3):
        text = text.strip().rstrip(".")
        match = _AROUND.fullmatch(text)
        if match is None:
            break
        text = next(group for group in match.groups() if group is not None)
    text = text.strip()
    return not text or text.lower() in _NO_ANSWERS or text in _NOT_APPLICABLE


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces match, None if there is none: a
    column that holds a worked solution (TRL's ``solution``) marks its answer so.
    """
    last_start = -1
    content = None
    opened: list[tuple[int, int, bool]] = []  # start, end of the brace, is a box
    for token in _BRACES.finditer(text):
        if token[0] != "}":
            opened.append((token.start(), token.end(), token[0] != "{"))
        elif opened:
            start, inner, is_box = opened.pop()
            if is_box and start > last_start:
                last_start = start
                content = text[inner : token.start()]
    return None if content is None else content.strip()


def is_structured(raw: object) -> bool:
    """Return whether an answer is a list or an object, or the JSON text of one."""
    return isinstance(parsed(raw), list | tuple | Mapping)


def parsed(raw: object) -> object:
    """Return the list of texts or the object in JSON text or in Python's repr of it (a table of
    CSV), any other value as it is.

    ``[1, 2]`` and ``{1, 2}`` stay texts: they are mathematics.
    """
    if not isinstance(raw, str) or raw.strip()[:1] not in ("[", "{"):
        return raw
    value = parsed_text(raw)
    is_list = isinstance(value, list) and all(isinstance(item, str) for item in value)
    return value if (is_list and value) or (isinstance(value, dict) and value) else raw


def _text(value: object, where: str) -> str:
    """Return the text of a single value: "" if there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, str | int | Decimal):
        return str(value).strip()
    raise _not_understood(value, where)


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _plain(name: object) -> str:
    return str(name).lower().replace("_", "")


def _not_understood(value: object, where: str) -> UserError:
    return UserError(
        f"{where}: the answer {value!r:.80} is not understood; expected a text, a number, a list "
        "of texts, or an object with value and aliases; name a field of it, data.columns={answer: "
        "NAME.FIELD}, or read the row by a function, data.row"
    )
