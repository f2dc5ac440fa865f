"""Rows of data files as demonstrations: which columns are the prompt and the response, and which
others are read (docs/supervised.md#data has the table).

What a row says is read, or it is known to be harmless, or it is refused by name (``keys.py``).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_dcpo.data.answer_keys import last_box
from megatron_dcpo.data.chat_template import THINKING
from megatron_dcpo.data.chats import (
    CHAT_COLUMNS,
    ENDINGS,
    REASONING,
    SYSTEMS,
    Chat,
    ChatReader,
    Message,
    Messages,
    behind_history,
    check_complete,
    history_of,
    is_chat_text,
    is_weight,
    tools_of,
    weight_in,
    with_system,
)
from megatron_dcpo.data.passages import (
    PASSAGE_COLUMNS,
    passage_of,
    passage_text,
    with_passage,
)
from megatron_dcpo.data.question_options import KEY_COLUMNS, options_of, shows_options
from megatron_dcpo.data.row_files import Row
from megatron_dcpo.data.unread_columns import RowKeys, Unread, is_empty
from megatron_dcpo.errors import UserError

logger = logging.getLogger(__name__)

PROMPTS = ("prompt", "problem", "question", "instruction", "input")
RESPONSES = ("response", "completion", "answer", "output", "solution")
# our names in data.columns, besides messages, prompt and response
BESIDE = ("weight", "spans", "system", "history", "context", "tools", "reasoning", "label")
_REASONS = "name it by data.columns={reasoning: NAME}, or leave it out by {reasoning: ''}"
# Nemotron's switch of the reasoning, which is not its text
_SWITCHES = ("on", "off", "true", "false", "yes", "no")
_OTHER = "name the response by data.columns={response: NAME}"
KEYS = RowKeys(
    what="column",
    read=frozenset(
        {*CHAT_COLUMNS, *PROMPTS, *RESPONSES, *SYSTEMS, *BESIDE, *REASONING, *PASSAGE_COLUMNS}
    ),
    harmless=frozenset(
        {
            *("options", "choices", *"abcdefghij", *(f"op{letter}" for letter in "abcde")),
            *(key.lower() for key in KEY_COLUMNS),
            *("problem_type", "question_type", "final_answer", "expected_answer", "ground_truth"),
            *ENDINGS,
            *("reward_model", "tests", "test_cases", "test_list", "unit_tests", "entry_point"),
        }
    ),
    refused={
        **dict.fromkeys(("cot", "complex_cot", "chain_of_thought", "rationale", "think"), _REASONS),
        **dict.fromkeys(("thoughts", "thought", "reasoning_trace", "explanation"), _REASONS),
        **dict.fromkeys(("chosen", "rejected"), _OTHER),
        **dict.fromkeys(("chat_template_kwargs", "documents"), "write it into the prompt"),
        **dict.fromkeys(("input_ids", "labels", "attention_mask"), "give the texts instead"),
        **dict.fromkeys(
            ("loss_mask", "loss_masks", "loss_weight", "train", "train_on_input", "trainable"),
            "name a number as data.columns={weight: NAME}, or remove it",
        ),
        **dict.fromkeys(
            ("chat_history", "conversation_history", "dialogue_history", "previous_messages"),
            "name it by data.columns={history: NAME}, or remove it",
        ),
        "available_tools": "name it by data.columns={tools: NAME}, or remove it",
        "functions": "give them as tools, a list of {type: function, function: ...}",
        "function_call": "give it as tool_calls of a message",
        "tool_calls": "give it as tool_calls of a message",
        "prefix": "put its text into the prompt",
        "suffix": "put its text into the prompt",
    },
)


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


class _Column(NamedTuple):
    """A column of a row: ours if ``data.columns`` names it, else one of a known name."""

    name: str
    value: Any


class RowReader:
    """The reader of the rows of a source. ``columns`` names the file's columns by ours; an empty
    name leaves a column out.
    """

    def __init__(self, source: str, columns: Mapping[str, str]) -> None:
        self._source = source
        self._columns = columns
        self._unread = Unread(source)
        self._chats = ChatReader(source, self._unread)
        self._short_answers: Counter[str] = Counter()
        self._responses: Counter[str] = Counter()  # rows by the column of their response
        self._used: set[str] = set()  # columns of the row that is being read

    def read(self, row: Row, number: int) -> Conversation:
        """Return the demonstration in row ``number``. Raises :class:`UserError`, which names it."""
        where = f"{self._source}: row {number}"
        left_out = [theirs for theirs in self._columns.values() if theirs and theirs not in row]
        if left_out:
            found = ", ".join(map(str, row)) or "nothing"
            raise UserError(
                f"{where} has no column {left_out[0]!r}, which data.columns names; found {found}"
            )
        named = {theirs for theirs in self._columns.values() if theirs}
        hidden = {name for name in self._empty_names() if name not in named}
        row = _in_lower_case(row, named)
        self._unread.take(row, KEYS, number, used=named | hidden)
        check_complete(row, where)
        self._used = named | hidden
        messages, weight = self._messages(row, number, where)
        *before, last = messages
        _check_turns(before, last, where)
        prompt = self._surrounded(tuple(before), row, number, where)
        _check_options(prompt, row, where)
        self._count_unused(row, number)
        answer = self._reasoned(last, row, where)
        spans = _spans(self._value(row, "spans"), len(last["content"]), where)
        if spans and len(answer) > 2:
            raise UserError(
                f"{where}: spans count the characters of a text; the response has more than that "
                f"({', '.join(key for key in answer if key not in ('role', 'content'))})"
            )
        return Conversation(
            messages=prompt,
            response=last["content"],
            weight=self._weight(row, where) * weight,
            spans=spans,
            earlier_turns=sum(message["role"] == "assistant" for message in prompt),
            tools=tools_of(self._value(row, "tools"), where),
            answer=answer if len(answer) > 2 else None,
        )

    def report(self) -> None:
        """Say once what was not read, which of two columns was, and whether rows have their
        responses in different ones.
        """
        self._unread.report()
        if len(self._responses) > 1:
            counts = [f"{name} ({count} rows)" for name, count in self._responses.items()]
            logger.warning(
                "%s: responses are in different columns: %s; data.columns={response: NAME} takes "
                "one",
                self._source,
                ", ".join(counts),
            )
        for names, count in self._short_answers.items():
            logger.warning("%s: %d rows have %s", self._source, count, names)

    # ------------------------------------------------------------------------------ the two forms
    def _messages(self, row: Row, number: int, where: str) -> tuple[Messages, float]:
        """Return the messages of a row, the response last, and the weight of the response."""
        has_names = self._columns.get("prompt") or self._columns.get("response")
        if self._columns.get("messages", not has_names):
            chat = self._column(row, "messages", CHAT_COLUMNS, where)
            if chat is not None:
                self._used.add(chat.name)
                read = self._chats.chat(chat.value, number)
                return read.messages, _weight_of_last(read, where)
        prompt = self._column(row, "prompt", PROMPTS, where)
        response = self._column(row, "response", RESPONSES, where)
        for what, column, names in (
            ("prompt", prompt, PROMPTS),
            ("response", response, RESPONSES),
        ):
            if column is None:
                found = ", ".join(map(str, row)) or "nothing"
                raise UserError(
                    f"{where} has neither messages nor a {what} ({', '.join(names)}); found "
                    f"{found}; name its columns, data.columns={{{what}: NAME}}"
                )
        assert prompt is not None
        assert response is not None
        self._responses[response.name] += 1
        asked = self._turns(prompt, "user", number, where)
        answered = self._turns(response, "assistant", number, where)
        both = Chat((*asked.messages, *answered.messages), (*asked.weights, *answered.weights))
        return both.messages, _weight_of_last(both, where)

    def _turns(self, column: _Column, role: str, number: int, where: str) -> Chat:
        value = column.value
        if not isinstance(value, str) or is_chat_text(value):
            if isinstance(value, int | float):
                raise UserError(
                    f"{where}: {column.name} is a text or a list of messages, not {value!r:.60}"
                )
            return self._chats.chat(value, number)
        return Chat(({"role": role, "content": value},), (None,))

    def _column(self, row: Row, ours: str, names: Sequence[str], where: str) -> _Column | None:
        """Return the column that ``data.columns`` names, or the only one of the known names that
        says something. Raises :class:`UserError` if there are several that differ.
        """
        if self._columns.get(ours):
            theirs = self._columns[ours]
            return _Column(theirs, row[theirs])
        found = [
            _Column(name, row[name])
            for name in names
            if row.get(name) is not None and name not in self._used
        ]
        full = [column for column in found if not is_empty(column.value)]
        if ours == "prompt" and "input" in row and "instruction" in row:
            full = [column for column in full if column.name != "input"]
            self._used.add("input")  # a passage
        if ours == "response":
            full = self._without_short_answer(full)
        for other in full[1:]:
            if other.value != full[0].value:
                raise UserError(
                    f"{where} has {full[0].name} and {other.name}, each of which could be the "
                    f"{ours}; name one, data.columns={{{ours}: {full[0].name}}}"
                )
        self._used.update(column.name for column in full)
        return next(iter(full or found), None)

    def _without_short_answer(self, columns: list[_Column]) -> list[_Column]:
        """Return the columns without a short answer that a worked solution ends with."""
        texts = [column for column in columns if isinstance(column.value, str)]
        if len(texts) < 2 or len(texts) < len(columns):
            return columns
        longest = max(texts, key=lambda column: len(column.value))
        kept = []
        for column in texts:
            if column is longest or not _is_answer_of(column.value, longest.value):
                kept.append(column)
            else:
                self._used.add(column.name)
                self._short_answers[
                    f"{column.name} next to {longest.name}, which ends with it: {longest.name} is "
                    "the response"
                ] += 1
        return kept

    # ------------------------------------------------------------------------- the other columns
    def _surrounded(self, messages: Messages, row: Row, number: int, where: str) -> Messages:
        """Return the prompt with passage, earlier turns and system message of its row."""
        messages = with_passage(messages, *self._passage(row, where))
        history = history_of(self._value(row, "history"), self._chats, number, where)
        messages = behind_history(messages, history)
        for name in (self._columns.get("system", name) for name in SYSTEMS):
            if name:
                messages = with_system(messages, row.get(name), name, where)
        return messages

    def _passage(self, row: Row, where: str) -> tuple[str, bool]:
        named = self._columns.get("context")
        if named == "":
            return "", False
        if named is not None:
            return passage_text(row[named], named, where), False
        chosen = set(self._columns.values()) - {"instruction"}
        return passage_of({key: row[key] for key in row if key not in chosen}, where)

    def _count_unused(self, row: Row, number: int) -> None:
        """Count the columns that could be a prompt or a response where others are."""
        if "instruction" in row:
            self._used.add("input")  # a passage, or left out by name
        for name in (*CHAT_COLUMNS, *PROMPTS, *RESPONSES):
            if name not in self._used and not is_empty(row.get(name)):
                self._unread.count(KEYS.what, name, number)

    def _reasoned(self, last: Message, row: Row, where: str) -> Message:
        """Return the response with the reasoning that another column holds. Raises
        :class:`UserError` if there is reasoning twice.
        """
        named = self._columns.get("reasoning")
        names = REASONING if named is None else (named,)
        for name in names:
            value = row.get(name) if name else None
            if is_empty(value):
                continue
            if not isinstance(value, str) or value.strip().lower() in _SWITCHES:
                raise UserError(
                    f"{where}: {name} is the text of the reasoning, not {value!r:.60}; leave it "
                    "out by data.columns={reasoning: ''}"
                )
            if any(key in last for key in REASONING):
                raise UserError(f"{where} has reasoning in {name} and in its message; remove one")
            last = {**last, "reasoning_content": value}
            break
        thinks = any(end in last["content"] for _, end in THINKING)
        if thinks and any(key in last for key in REASONING):
            raise UserError(
                f"{where} has reasoning beside a response whose text thinks already; remove one, "
                "data.columns={reasoning: ''} leaves out the column"
            )
        return last

    def _weight(self, row: Row, where: str) -> float:
        weight = self._value(row, "weight")
        own = 1.0 if weight is None else _weight(weight, where)
        label = self._value(row, "label")
        if is_empty(label):
            return own
        is_word = isinstance(label, str) and label.strip().lower() in ("true", "false")
        if not isinstance(label, bool) and not is_word:
            raise UserError(
                f"{where}: label is true or false (KTO), whether the response is to be learned, "
                f"not {label!r:.60}; leave it out by data.columns={{label: ''}}"
            )
        return own * weight_in(label, f"{where}: label")

    def _value(self, row: Row, ours: str) -> Any:  # noqa: ANN401 - a value of the file's
        name = self._columns.get(ours, ours)
        return row.get(name) if name else None

    def _empty_names(self) -> set[str]:
        """Return the known names of the columns that are left out."""
        known: dict[str, Sequence[str]] = {
            "context": (*PASSAGE_COLUMNS, "input"),
            "system": SYSTEMS,
            "reasoning": (
                *REASONING,
                *(name for name, remedy in KEYS.refused.items() if remedy == _REASONS),
            ),
        }
        empty = [ours for ours, theirs in self._columns.items() if not theirs]
        return {name for ours in empty for name in known.get(ours, (ours,))}


def _in_lower_case(row: Row, named: Collection[str]) -> Row:
    """Return the row with its columns of known names in lower case, but for the ``named`` ones."""
    values = {}
    for key, value in row.items():
        name = str(key).lower()
        is_ours = name in KEYS.read and name not in row and key not in named
        values[name if is_ours else key] = value
    return values


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


def _check_options(messages: Messages, row: Row, where: str) -> None:
    """Raise :class:`UserError` if the prompt does not show the options of its row."""
    options = options_of(row, where)
    if options is None or shows_options(messages[-1]["content"], options):
        return
    raise UserError(
        f"{where}: the prompt does not show its {len(options.texts)} options; write them into it, "
        "or remove them"
    )


def _is_answer_of(short: str, worked: str) -> bool:
    """Return whether a text is the answer at which a longer one arrives."""
    answer = short.strip()
    if last_box(worked) == answer:
        return True
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", worked) is not None


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
