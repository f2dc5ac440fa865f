"""Chats as the rows of data files have them: a list of messages with ``role`` and ``content`` (or
ShareGPT's ``from`` and ``value``), also as JSON text or as Python's repr of it.

A message keeps what a chat template may write: reasoning, calls of tools and their results, a name.
``chat_template.py`` refuses what the template does not write. Whether a turn is to be trained is
its weight.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.text import parse_json

Message = dict[str, Any]
Messages = tuple[Message, ...]

# keys of an object that holds a whole chat
CHAT_COLUMNS = ("messages", "conversations")
# of a message, in the order in which a template's own name for it is tried
REASONING = ("reasoning_content", "reasoning", "thinking")
# what a template may write of a message besides its role and content
TEMPLATE_KEYS = (*REASONING, "tool_calls", "function_call", "name", "tool_call_id")
# whether a message is to be trained: Axolotl, ms-swift, OpenAI, verl
WEIGHT_KEYS = ("train", "loss", "weight", "loss_mask", "trainable", "training")
# why a text ends, and what stands there if it was cut off (OpenAI, Anthropic, Gemini)
ENDINGS = ("finish_reason", "stop_reason")
_CUT_OFF = ("length", "max_tokens")
_READ = frozenset({"role", "content", "from", "value", *TEMPLATE_KEYS, *WEIGHT_KEYS, *ENDINGS})
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


# what is called with a key of a message that is not read, and its value
UnreadKey = Callable[[str, object], None]


def _ignore(key: str, value: object) -> None:
    """Take no note of a key that is not read."""


def read_chat(value: object, where: str, unread: UnreadKey = _ignore) -> Chat:
    """Return the chat in a value of a row. Raises :class:`UserError`, which names the row, for what
    is none.
    """
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
        for key in entry:
            if key not in _READ:
                unread(str(key), entry[key])
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


def with_system(messages: Messages, value: object, where: str) -> Messages:
    """Return the messages behind the system message of a row. Raises :class:`UserError` if it is
    no text, or if the messages have another one.
    """
    if is_empty(value):
        return messages
    if not isinstance(value, str):
        raise UserError(f"{where}: system is a text, not {value!r:.60}")
    if messages[0]["role"] == "system":
        if messages[0]["content"].strip() == value.strip():
            return messages
        raise UserError(
            f"{where} has two system messages, in its messages and as system; remove one, or leave "
            "it out by data.columns={system: ''}"
        )
    return ({"role": "system", "content": value}, *messages)


def is_empty(value: object) -> bool:
    """Return whether a value says nothing: null, NaN, an empty text, list or object, or an object
    in which every value is one of these, as a table has it where other rows have one.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    return isinstance(value, list | tuple) and len(value) == 0


def without_empty(value: object) -> object:
    """Return a value without the null values of its objects, at every depth: a table gives every
    object the keys of all others.
    """
    if isinstance(value, Mapping):
        return {key: without_empty(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [without_empty(one) for one in value]
    return value


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
