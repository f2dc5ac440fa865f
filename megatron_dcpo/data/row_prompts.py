"""From a row in the schema to the messages of its prompt: the problem, a passage before it, its
options below it, the system message, and the tools that a chat template lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dcpo.data.chats import (
    Messages,
    UnreadKey,
    is_chat_text,
    is_empty,
    read_chat,
    tools_of,
    with_system,
)
from megatron_dcpo.data.question_options import Options, with_options
from megatron_dcpo.errors import UserError
from megatron_dcpo.types import SchemaRow


def problem_messages(row: SchemaRow, where: str, unread: UnreadKey) -> Messages:
    """Return the messages of a problem: a text, or a chat that ends with the user's message, also
    as JSON text or as Python's repr. Raises :class:`UserError` for anything else.
    """
    problem = row.messages if is_empty(row.problem) else row.problem
    if is_text(problem) and not is_empty(problem):
        return ({"role": "user", "content": problem},)
    messages: Messages = ()
    if problem and isinstance(problem, str | list | tuple | Mapping):
        chat = read_chat(problem, where, unread)
        if chat.weights[-1] is not None:
            raise UserError(
                f"{where}: the last message says whether it is to be trained; a prompt is not"
            )
        messages = chat.messages
    if not messages or messages[-1]["role"] != "user":
        raise UserError(
            f"{where}: the problem is neither text nor a list of messages that ends with the user's"
        )
    return messages


def is_text(value: object) -> bool:
    """Return whether a value is a text that holds no chat."""
    return isinstance(value, str) and not is_chat_text(value)


def surrounded(messages: Messages, row: SchemaRow, options: Options | None, where: str) -> Messages:
    """Return the messages of a problem with its ``options`` and what else a row has for its
    prompt.
    """
    if options is not None:
        *before, last = messages
        content = with_options(last["content"].strip(), options.texts)
        messages = (*before, {**last, "content": content})
    messages = with_passage(messages, passage_text(row.context, where))
    return with_system(messages, row.system, where)


def passage_text(value: object, where: str) -> str:
    """Return a passage: a text, or a list of texts as paragraphs. Raises :class:`UserError` for
    anything else.
    """
    if is_empty(value):
        return ""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        return "\n\n".join(one.strip() for one in value).strip()
    raise UserError(
        f"{where}: the context of the problem is not a text but {value!r:.60}; name a column of "
        "text by data.columns: {context: NAME}, or leave it out by {context: ''}"
    )


def with_passage(messages: Messages, passage: str) -> Messages:
    """Return the messages with the passage before the problem, which is the last of them, and an
    empty line between; unchanged if a message shows it already.
    """
    shown = _words(passage)
    if any(shown in _words(message["content"]) for message in messages):
        return messages
    *before, last = messages
    return (*before, {**last, "content": f"{passage}\n\n{last['content']}"})


def listed_tools(row: SchemaRow, messages: Messages, where: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row. Raises :class:`UserError` if the first message lists them too."""
    tools = tools_of(row.tools, where)
    first = "".join(messages[0]["content"].split()).replace("'", '"')
    functions = [tool.get("function", tool) for tool in tools]
    names = [one.get("name") for one in functions if isinstance(one, Mapping)]
    is_listed = "<tools>" in first or all(f'"name":"{name}"' in first for name in names)
    if tools and is_listed:
        raise UserError(
            f"{where}: the first message lists the tools that the row has as tools; remove them "
            "from one, or leave the latter out by data.columns={tools: ''}"
        )
    return tools


def _words(text: str) -> str:
    """Return a text with single spaces, by which two are compared."""
    return " ".join(text.split())
