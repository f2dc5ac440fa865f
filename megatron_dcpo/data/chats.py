"""Chats as the rows of data files have them: a list of messages with ``role`` and ``content`` (or
ShareGPT's ``from`` and ``value``), also as JSON text or as Python's repr of it.

A message keeps what a chat template may write: reasoning, calls of tools and their results, a name.
``chat_template.py`` refuses what the template does not write. Whether a turn is to be trained is
its weight.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from megatron_dcpo.data.unread_columns import RowKeys, Unread, is_empty, without_empty
from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import parse_json

Message = dict[str, Any]
Messages = tuple[Message, ...]

# columns that hold a whole chat
CHAT_COLUMNS = ("messages", "conversations", "conversation")
SYSTEMS = ("system", "system_prompt", "system_message", "system_instruction")
# of a message, in the order in which a template's own name for it is tried
REASONING = ("reasoning_content", "reasoning", "thinking")
# what a template may write of a message besides its role and content
TEMPLATE_KEYS = (*REASONING, "tool_calls", "function_call", "name", "tool_call_id")
# whether a message is to be trained: Axolotl, ms-swift, OpenAI, verl
WEIGHT_KEYS = ("train", "loss", "weight", "loss_mask", "trainable", "training")
_WEIGHT = "say train: false, or weight: 0, of a turn that is not to be trained"
# why a text ends, and what stands there if it was cut off (OpenAI, Anthropic, Gemini)
ENDINGS = ("finish_reason", "stop_reason")
_CUT_OFF = ("length", "max_tokens")
MESSAGE_KEYS = RowKeys(
    what="key of a message",
    read=frozenset({"role", "content", "from", "value", *TEMPLATE_KEYS, *WEIGHT_KEYS, *ENDINGS}),
    harmless=frozenset({"turn", "logprobs", "usage", "end_turn"}),
    refused={
        **dict.fromkeys(
            ("mask", "masked", "ignore", "learn", "no_loss", "train_on_turn", "train_on_input"),
            _WEIGHT,
        ),
        **dict.fromkeys(
            ("thought", "thoughts", "reasoning_details", "reasoning_text", "cot"),
            "give its text as reasoning_content",
        ),
        "files": "only text is read; remove the rows that have it",
        "prefix": "remove it",
        "refusal": "put its text into content",
        "tools": "a row has its tools in the column tools",
        "functions": "a row has its tools in the column tools",
        "tool_responses": "give each result as a message of the role tool",
        "tool_results": "give each result as a message of the role tool",
        "documents": "put their text into content",
        "context": "put its text into content",
        "chosen": "put its text into content",
        "rejected": "remove it; pairs of preferences are not trained",
    },
)
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
# the beginning of a list of messages, or of one, in JSON, Python's repr or NumPy's
_BEGINS_AS_CHAT = re.compile(
    r"\s*(?:array\()?[\[({\s]*\{\s*\\?[\"'](?:role|content|from|value)\\?[\"']\s*:"
)
# what the text of any list or object begins with, also as JSON text of JSON text, and a key of a
# message in it
_BEGINS_AS_VALUE = re.compile(r"\s*\"?\s*[\[({].*?\b(?:role|from)\b", re.DOTALL)


class Chat(NamedTuple):
    """Messages, and the weight that each of them states: None where it states none."""

    messages: Messages
    weights: tuple[float | None, ...]


class ChatReader:
    """The reader of the chats of a source, ``unread`` being what counts their unknown keys."""

    def __init__(self, source: str, unread: Unread | None = None) -> None:
        self.source = source
        self._unread = unread or Unread(source)

    def chat(self, value: object, number: int) -> Chat:
        """Return the chat in a value of row ``number``. Raises :class:`UserError`, which names the
        row, for what is none.
        """
        where = f"{self.source}: row {number}"
        entries = chat_in(value)
        if entries is None:
            raise UserError(
                f"{where}: expected a list of messages with role and content, not {value!r:.80}"
            )
        messages = []
        weights = []
        for entry in entries:
            if not isinstance(entry, Mapping):
                raise _no_message(entry, where)
            self._unread.take(entry, MESSAGE_KEYS, number)
            messages.append(_message(entry, where))
            weights.append(_own_weight(entry, where))
        if weights[-1] != 0:
            check_complete(entries[-1], where)
        return Chat(tuple(messages), tuple(weights))


def check_complete(record: object, where: str) -> None:
    """Raise :class:`UserError` if a message, or the row of a response, says that its text was cut
    off: an end would be taught that the text does not have.
    """
    if not isinstance(record, Mapping):
        return
    for key in ENDINGS:
        if str(record.get(key)).lower() in _CUT_OFF:
            raise UserError(f"{where}: {key} is {record[key]!r}, so it was cut off; remove the row")


def chat_in(value: object) -> Sequence[object] | None:
    """Return the messages in a value: a list, one message, or one of these as text. None for any
    other value, and for a text that is no chat.
    """
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, Mapping) and is_message(value):
        return [value]
    if isinstance(value, list | tuple) and value:
        return value
    return None


def is_message(value: object) -> bool:
    """Return whether a value has the two keys of a message."""
    if not isinstance(value, Mapping):
        return False
    return {"role", "content"} <= value.keys() or {"from", "value"} <= value.keys()


def is_chat_text(text: str) -> bool:
    """Return whether a text holds a chat, so that it is no question itself: messages with their
    keys in any order, or an object that has them in one of :data:`CHAT_COLUMNS`.
    """
    if _BEGINS_AS_CHAT.match(text) is not None:
        return True
    if _BEGINS_AS_VALUE.match(text) is None:
        return False
    value = _parsed(text)
    if isinstance(value, Mapping):
        value = next((value[name] for name in CHAT_COLUMNS if name in value), [value])
    return isinstance(value, list | tuple) and any(map(is_message, value))


def tools_of(value: object, where: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row: a list of objects, or its JSON text. Raises :class:`UserError` for
    any other value.
    """
    tools = _parsed(value) if isinstance(value, str) else value
    if is_empty(tools):
        return ()
    if isinstance(tools, Mapping):
        tools = [tools]
    are_objects = isinstance(tools, list | tuple) and all(
        isinstance(tool, Mapping) and tool for tool in tools
    )
    if not are_objects:
        raise UserError(f"{where}: tools is a list of objects, not {value!r:.80}")
    return tuple(without_empty(tools))  # type: ignore[arg-type]


def with_system(messages: Messages, value: object, column: str, where: str) -> Messages:
    """Return the messages behind the system message of a row. Raises :class:`UserError` if it is
    no text, or if the messages have another one.
    """
    if is_empty(value):
        return messages
    if not isinstance(value, str):
        raise UserError(f"{where}: {column} is a text, not {value!r:.60}")
    if messages[0]["role"] == "system":
        if messages[0]["content"].strip() == value.strip():
            return messages
        raise UserError(
            f"{where} has two system messages, in its messages and in the column {column}; "
            "remove one"
        )
    return ({"role": "system", "content": value}, *messages)


def history_of(value: object, reader: ChatReader, number: int, where: str) -> Messages:
    """Return the earlier turns of a row: pairs of what the user and the assistant said
    (LlamaFactory), or messages.
    """
    if is_empty(value):
        return ()
    turns = _parsed(value) if isinstance(value, str) else value
    if not isinstance(turns, list | tuple):
        raise UserError(f"{where}: history is a list of pairs of texts, not {value!r:.80}")
    if all(is_message(turn) for turn in turns):
        return reader.chat(turns, number).messages
    messages: list[Message] = []
    for turn in turns:
        is_pair = isinstance(turn, list | tuple) and len(turn) == 2
        if not is_pair or not all(isinstance(text, str) for text in turn):
            raise UserError(f"{where}: history is a list of pairs of texts, not of {turn!r:.80}")
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})
    return tuple(messages)


def behind_history(messages: Messages, history: Messages) -> Messages:
    """Return the messages with earlier turns before them, behind the system message."""
    if history and messages[0]["role"] == "system":
        return (messages[0], *history, *messages[1:])
    return (*history, *messages)


def _message(entry: Mapping[Any, Any], where: str) -> Message:
    role, content = entry.get("role"), entry.get("content")
    if "role" not in entry and "from" in entry:
        role, content = entry["from"], entry.get("value")
    if not isinstance(role, str) or not role:
        raise _no_message(entry, where)
    role = _ROLES.get(role.lower(), role.lower())
    if role == "function_call":
        raise UserError(
            f"{where}: a message of the role function_call is not read; give the call as "
            "tool_calls of the assistant's message"
        )
    message: Message = {"role": role}
    extras = {key: entry[key] for key in TEMPLATE_KEYS if not is_empty(entry.get(key))}
    if is_empty(content) and not isinstance(content, str) and extras:
        content = ""
    message["content"] = _text(content, where)
    for key, value in extras.items():
        message[key] = _calls(value, where) if key == "tool_calls" else without_empty(value)
    return message


def _calls(value: object, where: str) -> list[Any]:
    """Return calls of tools, their arguments as objects, as chat templates expect them."""
    calls = _parsed(value) if isinstance(value, str) else value
    if not isinstance(calls, list | tuple) or not all(isinstance(one, Mapping) for one in calls):
        raise UserError(f"{where}: tool_calls is a list of objects, not {value!r:.80}")
    return [_call(call) for call in calls]


def _call(call: Mapping[Any, Any]) -> dict[Any, Any]:
    kept = {key: without_empty(value) for key, value in call.items() if value is not None}
    function = kept.get("function")
    if isinstance(function, Mapping):
        kept["function"] = _call(function)
    arguments = kept.get("arguments")
    if isinstance(arguments, str):
        parsed = _parsed(arguments)
        kept["arguments"] = parsed if isinstance(parsed, Mapping) else arguments
    return kept


def _text(content: object, where: str) -> str:
    """Return the content of a message: a text, or a list of parts that are all texts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple) and content:
        texts = [
            part.get("text")
            for part in content
            if isinstance(part, Mapping) and part.get("type") == "text"
        ]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    raise UserError(
        f"{where}: the content of a message is not text but {content!r:.60}; only text is read"
    )


def _own_weight(entry: Mapping[Any, Any], where: str) -> float | None:
    """Return what a message says of its weight; None if it says nothing."""
    weights = {}
    for key in WEIGHT_KEYS:
        value = entry.get(key)
        if not is_empty(value):
            weights[key] = weight_in(value, f"{where}: {key} of a message")
    if len(set(weights.values())) > 1:
        raise UserError(f"{where}: {' and '.join(weights)} of a message say two things")
    return next(iter(weights.values()), None)


def weight_in(value: object, what: str) -> float:
    """Return the weight that true, false or a number says. Raises :class:`UserError`, which begins
    with ``what`` it is, for anything else.
    """
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        value = value.strip().lower() == "true"
    if not is_weight(value):
        raise UserError(f"{what} is true, false or a number from 0 on, not {value!r:.60}")
    return float(value)


def is_weight(value: object) -> TypeGuard[float]:
    """Return whether a value is a number from 0 on that a float can hold; true and false are 1 and
    0.
    """
    return isinstance(value, int | float) and 0 <= value <= sys.float_info.max


def _no_message(entry: object, where: str) -> UserError:
    return UserError(f"{where}: a message is an object with role and content, not {entry!r:.80}")


def _parsed(text: str) -> Any:  # noqa: ANN401 - a value of any shape
    """Return the list or the object in JSON text, or in Python's repr of one; else the text."""
    for _ in range(2):  # JSON text of JSON text
        if not isinstance(text, str) or text.strip()[:1] not in ("[", "{", "(", '"'):
            return text
        text = parsed_text(text)
    return text


def parsed_text(text: str) -> Any:  # noqa: ANN401 - a value of any shape
    """Return the value in JSON text, or the list or the object in Python's repr of one; any other
    text as it is.
    """
    try:
        return parse_json(text)
    except ValueError:
        pass
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text
    return value if isinstance(value, list | tuple | dict) else text
