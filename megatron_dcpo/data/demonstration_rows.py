"""Rows in the schema as demonstrations (docs/supervised.md#data has the table): a chat, or a
problem and its response, with the rest of the prompt, and what the tokens of the response count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_dcpo.data.chat_template import THINKING
from megatron_dcpo.data.chats import (
    REASONING,
    Chat,
    Message,
    Messages,
    UnreadKey,
    check_complete,
    is_empty,
    is_weight,
    read_chat,
    weight_in,
)
from megatron_dcpo.data.question_options import options_of
from megatron_dcpo.data.row_files import Row
from megatron_dcpo.data.row_prompts import is_text, listed_tools, surrounded
from megatron_dcpo.data.row_reader import (
    DEMONSTRATIONS,
    KNOWN,
    ReadRow,
    RowOptions,
    RowReader,
    what_there_is,
)
from megatron_dcpo.errors import UserError

# Nemotron's switch of the reasoning, which is not its text
_SWITCHES = ("on", "off", "true", "false", "yes", "no")


@dataclass(frozen=True)
class Conversation:
    """A row as it was read: the messages before the response, the response, and its weights.
    ``answer`` is the whole message of the response, if it has more than its text.
    """

    messages: Messages
    response: str
    weight: float
    spans: tuple[tuple[int, int, float], ...]
    earlier_turns: int  # of the assistant, which belong to the prompt
    tools: tuple[dict[str, Any], ...] = ()
    answer: Message | None = None


class DemonstrationReader:
    """The reader of the demonstrations of a source."""

    def __init__(self, source: str, reading: RowOptions) -> None:
        self.rows = RowReader(source, reading, DEMONSTRATIONS)

    def read(self, raw: Row, number: int) -> Conversation | None:
        """Return the demonstration in row ``number``, None if ``data.row`` leaves it out. Raises
        :class:`UserError`, which names the row.
        """
        read = self.rows.read(raw, number)
        if read is None:
            return None
        row = read.row
        where = f"{self.rows.source}: row {number}"
        check_complete(raw, where)
        chat = _chat_of(read, where, partial(self.rows.unread_key, number=number))
        *before, last = chat.messages
        _check_turns(before, last, where)
        prompt = surrounded(tuple(before), row, options_of(row.options, where), where)
        answer = _reasoned(last, row.reasoning, where)
        spans = _spans(row.spans, len(last["content"]), where)
        more = [key for key in answer if key not in ("role", "content")]
        if spans and more:
            raise UserError(
                f"{where}: spans count the characters of a text; the response has more than that "
                f"({', '.join(more)})"
            )
        weight = 1.0 if row.weight is None else weight_in(row.weight, f"{where}: weight")
        return Conversation(
            messages=prompt,
            response=last["content"],
            weight=weight * _weight_of_last(chat, where),
            spans=spans,
            earlier_turns=sum(message["role"] == "assistant" for message in prompt),
            tools=listed_tools(row, prompt, where),
            answer=answer if more else None,
        )


def _chat_of(read: ReadRow, where: str, unread: UnreadKey) -> Chat:
    """Return the messages of a row, the response last."""
    row = read.row
    if not is_empty(row.messages):
        return read_chat(row.messages, where, unread)
    response = row.answer if is_empty(row.response) else row.response
    if is_empty(row.problem) or ("response" not in read.has and is_empty(response)):
        missing = "problem" if is_empty(row.problem) else "response"
        raise UserError(
            f"{where} has neither messages nor a {missing} ({', '.join(KNOWN[missing])}); "
            f"{what_there_is(read.columns)}; name its columns, data.columns={{{missing}: NAME}}, "
            "or read the rows by a function, data.row"
        )
    asked = _turns(row.problem, "user", where, unread)
    answered = _turns(response, "assistant", where, unread)
    return Chat((*asked.messages, *answered.messages), (*asked.weights, *answered.weights))


def _turns(value: object, role: str, where: str, unread: UnreadKey) -> Chat:
    """Return a problem or a response as messages."""
    if is_text(value):
        return Chat(({"role": role, "content": value},), (None,))
    if value is None or isinstance(value, int | float):
        raise UserError(f"{where}: the {role}'s turn is a text or messages, not {value!r:.60}")
    return read_chat(value, where, unread)


def _reasoned(last: Message, reasoning: object, where: str) -> Message:
    """Return the response with the reasoning of its row. Raises :class:`UserError` if there is
    reasoning twice.
    """
    if not is_empty(reasoning):
        is_switch = str(reasoning).strip().lower() in _SWITCHES
        if not isinstance(reasoning, str) or is_switch:
            raise UserError(
                f"{where}: reasoning is the text of the reasoning, not {reasoning!r:.60}; leave it "
                "out by data.columns={reasoning: ''}"
            )
        if any(key in last for key in REASONING):
            raise UserError(f"{where} has reasoning in a column and in its message; remove one")
        last = {**last, "reasoning_content": reasoning}
    thinks = any(end in last["content"] for _, end in THINKING)
    if thinks and any(key in last for key in REASONING):
        raise UserError(
            f"{where} has reasoning next to a response whose text thinks already; remove one, "
            "data.columns={reasoning: ''} leaves out the column"
        )
    return last


def _check_turns(before: Sequence[Message], last: Message, where: str) -> None:
    if last["role"] != "assistant":
        raise UserError(
            f"{where}: the last message is the {last['role']}'s; a demonstration ends with the "
            "assistant's"
        )
    if not before or before[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{where}: a demonstration's response follows a message of the user's")
    if not last["content"].strip() and len(last) == 2:
        raise UserError(f"{where}: the response is empty")


def _weight_of_last(chat: Chat, where: str) -> float:
    """Return the weight of the response. Raises :class:`UserError` if a message that cannot be
    trained is to be.
    """
    for message, weight in zip(chat.messages, chat.weights, strict=True):
        if weight and message["role"] != "assistant":
            raise UserError(
                f"{where}: a message of the {message['role']}'s is to be trained; only the "
                "assistant's last turn is"
            )
    weight = chat.weights[-1]
    return 1.0 if weight is None else weight


def _weight(value: object, where: str) -> float:
    if isinstance(value, bool) or not is_weight(value):
        raise UserError(f"{where}: a weight is a number from 0 on, not {value!r:.60}")
    return float(value)


def _spans(value: object, length: int, where: str) -> tuple[tuple[int, int, float], ...]:
    """Return (start, end, weight) of every span, in characters of a response of ``length``."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise UserError(f"{where}: spans is a list, not {type(value).__name__}")
    spans = []
    for span in value:
        if not isinstance(span, Mapping) or set(span) != {"start", "end", "weight"}:
            raise UserError(f"{where}: a span is {{start, end, weight}}, not {span!r:.80}")
        start, end = span["start"], span["end"]
        are_characters = type(start) is int and type(end) is int
        if not are_characters or not 0 <= start < end <= length:
            raise UserError(
                f"{where}: the span from {start!r:.20} to {end!r:.20} is not in the response of "
                f"{length} characters"
            )
        spans.append((start, end, _weight(span["weight"], where)))
    return tuple(spans)
