"""The messages of a chat: compared by what they mean, and made of what the policy has said.

Clients write a history in their own way: arguments of a call with other spaces, ``""`` for no
content, ids of their own. Two messages are the same if role, content, calls (names, and arguments
as parsed JSON) and results are. Reasoning that a client leaves out is no difference; another
reasoning is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dcpo.judging.thinking import ThinkingTags, split_reasoning
from megatron_dcpo.runtime.text import parse_json

Message = dict[str, Any]

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_OPENS_CALL = "<tool_call>"


class MessageError(ValueError):
    """A message says what is not supported."""


def tool_call(name_of_call: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a tool, as chat templates read it."""
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": name_of_call, "type": "function", "function": function}


def is_same(ours: Message, theirs: Message) -> bool:
    """Return whether a client's message is ours, as a client writes it."""
    if (ours["role"], ours["content"]) != (theirs["role"], theirs["content"]):
        return False
    if _meaning(ours) != _meaning(theirs):
        return False
    reasoning = theirs.get("reasoning_content")
    return reasoning is None or reasoning == ours.get("reasoning_content")


def begins_with(messages: Sequence[Message], ours: Sequence[Message]) -> bool:
    """Return whether a client's messages begin with ``ours``."""
    if len(messages) < len(ours):
        return False
    return all(is_same(mine, theirs) for mine, theirs in zip(ours, messages, strict=False))


def _meaning(message: Message) -> str:
    """Return the calls of a message as text that does not depend on how they are written."""
    calls = []
    for call in message.get("tool_calls", ()):
        calls.append([call["function"]["name"], call["function"]["arguments"]])
    return json.dumps(calls, sort_keys=True)


def reply_of(
    text: str, tags: ThinkingTags | None, prompt_end: bytes, *, parses_calls: bool, name: str
) -> Message:
    """Return what the policy has said as a message: reasoning, content, and the calls in it in
    Hermes' form if they are asked for. A call that is malformed stays text. ``prompt_end`` is the
    end of the prompt, which may open the thinking; ids of calls begin with ``name``.
    """
    reasoning, content = split_reasoning(text, tags, prompt_end)
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = _parsed_calls(content, name) if parses_calls else []
    if calls:
        message["content"] = content.partition(_OPENS_CALL)[0].strip()
        message["tool_calls"] = calls
    return message


def _parsed_calls(content: str, name: str) -> list[dict[str, Any]]:
    """Return the calls in a text, none if one of them is malformed or not closed."""
    calls = []
    found = _TOOL_CALL.findall(content)
    if len(found) != content.count(_OPENS_CALL):
        return []
    for number, text in enumerate(found):
        try:
            value = parse_json(text)
        except ValueError:
            return []
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return []
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            return []
        calls.append(tool_call(f"call_{name}_{number}", value["name"], arguments))
    return calls
