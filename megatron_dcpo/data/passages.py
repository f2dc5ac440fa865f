"""The passage that a question is about: a text in a column next to the question, which is put
before it. Without it the question would be another one.

Data sets call the column ``context`` (SQuAD, PubMedQA), ``passage`` (BoolQ, DROP), ``article``
(RACE), ``story`` (CoQA), ``paragraph``, ``document``, ``body`` (SVAMP), ``theory``, ``premises`` or
``table``, in lower or upper case; Alpaca has ``input`` next to ``instruction``, behind which it is
put, as Alpaca's prompt has it.
"""

from __future__ import annotations

from megatron_dcpo.data.chats import Messages
from megatron_dcpo.data.row_files import Row
from megatron_dcpo.data.unread_columns import holds_media, is_empty
from megatron_dcpo.errors import UserError

PASSAGE_COLUMNS = (
    "context",
    "passage",
    "article",
    "paragraph",
    "story",
    "document",
    "body",
    "theory",
    "premises",
    "table",
)
_FIX = "name a column of text by data.columns: {context: NAME}, or leave it out by {context: ''}"


def passage_of(row: Row, where: str) -> tuple[str, bool]:
    """Return the passage of a row, "" if it has none, and whether it is put behind the question.
    HotpotQA's objects, and objects of other sets in its format, are left out (``questions.py``).

    Raises :class:`UserError` for several passages, and for one that is not a text.
    """
    names = set(PASSAGE_COLUMNS)
    if "instruction" in row:
        names.add("input")
    found: dict[str, str] = {}
    for column, value in row.items():
        if str(column).lower() not in names:
            continue
        if "supporting_facts" in row and not isinstance(value, str):
            continue
        text = passage_text(value, str(column), where)
        if text and text not in found.values():
            found[str(column)] = text
    if len(found) > 1:
        raise UserError(
            f"{where} has several passages, in {', '.join(found)}; join them in the file, or {_FIX}"
        )
    is_behind = [column.lower() for column in found] == ["input"]
    return next(iter(found.values()), ""), is_behind


def passage_text(value: object, column: str, where: str) -> str:
    """Return the text in a column of passages: a text, or a list of texts as paragraphs. Raises
    :class:`UserError` for anything else.
    """
    if is_empty(value):
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return "\n\n".join(one.strip() for one in value).strip()
    raise UserError(
        f"{where}: the question has a passage in column {column!r} that is not a text, "
        f"{value!r:.60}; {_FIX}"
    )


def with_passage(messages: Messages, passage: str, behind: bool = False) -> Messages:
    """Return the messages with the passage before the problem, which is the last of them, and an
    empty line between; or ``behind`` it, in a new line. Unchanged if there is none, and if a
    message shows it already: one that is put behind, which may be a single word, at its end.
    """
    *before, last = messages
    shown = _words(passage)
    is_shown = any(shown in _words(message["content"]) for message in messages)
    if behind:
        is_shown = f" {_words(last['content'])}".endswith(f" {shown}")
    if is_shown:
        return messages
    content = f"{passage}\n\n{last['content']}"
    if behind:
        content = f"{last['content']}\n{passage}"
    return (*before, {**last, "content": content})


def has_media(row: Row) -> bool:
    """Return whether a row has an image, a video or an audio recording, without which a question
    is another one.
    """
    return any(holds_media(str(column), value) for column, value in row.items())


def _words(text: str) -> str:
    """Return a text with single spaces, by which two are compared."""
    return " ".join(text.split())
