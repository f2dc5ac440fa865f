"""The answer of a row in the forms of public data sets: a text, a number, a list of texts of which
each is right, an object that holds one of these, or any of them as JSON text or Python's repr.

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

# Keys of an object that hold the answer, and other keys that do not change it, in lower case
# and without underscores.
_HOLDERS = ("target", "answer", "groundtruth", "finalanswer", "text", "value")
_ALIASES = ("aliases", "normalizedaliases", "humananswers")
_BESIDE = frozenset({"type", "style", "normalizedvalue", "answerstart", "matchedwikientityname"})
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
_BRACES = re.compile(r"\\boxed\{|[{}]")
FORMS = (
    "a text, a number, a list of texts, an object with one of them as target, answer, "
    "ground_truth or value (and aliases), or one of these as JSON text or Python's repr"
)


class Answer(NamedTuple):
    """The ``texts`` that are right, of which the first is shown; none if the row has no answer.
    ``column`` is what the verifiers of questions read besides: all texts as a list if there are
    several, TriviaQA's object as it is, or else None.
    """

    texts: tuple[str, ...]
    column: object = None


def answer_of(raw: object, where: str) -> Answer:
    """Return the answer in a value of a row. Raises :class:`UserError`, which names the row and the
    forms that are known, for a value of another form.
    """
    texts = tuple(dict.fromkeys(text for text in _texts(raw, where) if text))
    value = parsed(raw)
    column: object = list(texts) if len(texts) > 1 else None
    if isinstance(value, Mapping) and any(_plain(name) in _ALIASES for name in value):
        column = value
    return Answer(texts, column)


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


def _texts(raw: object, where: str) -> list[str]:
    value = parsed(raw)
    if isinstance(value, Mapping):
        return _texts_of_object(value, where)
    if isinstance(value, list | tuple):
        texts = []
        for item in value:
            if isinstance(item, list | tuple | Mapping):
                raise _not_understood(raw, where)
            texts += _texts(item, where)
        return texts
    return [_text(value, where)]


def _text(value: object, where: str) -> str:
    """Return the text of a single value: "" if there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, str | int | Decimal):
        return str(value).strip()
    raise _not_understood(value, where)


def _texts_of_object(value: Mapping[object, object], where: str) -> list[str]:
    """Return the texts in an object with one holder of the answer, and aliases of it."""
    fields = {_plain(name): field for name, field in value.items()}
    holders = [name for name in _HOLDERS if name in fields]
    aliases = [name for name in _ALIASES if name in fields]
    known = {*holders, *aliases} | _BESIDE
    if len(holders) > 1 or not (holders or aliases) or not known.issuperset(fields):
        raise _not_understood(value, where)
    texts: list[str] = []
    for name in (*holders, *aliases):
        field = fields[name]
        if isinstance(field, Mapping):
            raise _not_understood(value, where)
        texts += _texts(field, where)
    return texts


def _plain(name: object) -> str:
    return str(name).lower().replace("_", "")


def _not_understood(value: object, where: str) -> UserError:
    shown = f"{value!r:.80}"
    hint = ""
    if isinstance(value, Mapping) and {"target", "numbers"} <= value.keys():
        hint = " (countdown: reasoning_gym:countdown has its scorer)"
    return UserError(
        f"{where}: the answer {shown} is not understood{hint}; expected {FORMS}; or a verifier of "
        "your own, which gets it as it is"
    )
