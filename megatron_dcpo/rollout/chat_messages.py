"""The messages of a chat as agents send them: read into one form, compared by what they mean, and
made of what the policy has said.

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

from megatron_dcpo.errors import one_line
from megatron_dcpo.judging.thinking import ThinkingTags, answer_start
from megatron_dcpo.runtime.text import parse_json

Message = dict[str, Any]

_ROLES = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name of it
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
# what clients send with a message that says nothing to the policy
_HARMLESS = frozenset(("annotations", "refusal", "id", "status"))
_OF_ANSWERS = frozenset(("tool_calls", "reasoning_content", "reasoning"))
_OF_RESULTS = frozenset(("tool_call_id", "name"))
_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_OPENS_CALL = "<tool_call>"


class MessageError(ValueError):
    """A message cannot be read, or says what is not supported."""


def read_messages(value: object) -> tuple[Message, ...]:
    """Return the messages of a request in the form that chat templates read. Raises
    :class:`MessageError`, which names what is wrong.
    """
    if not isinstance(value, list) or not value:
        raise MessageError("messages must be a list with at least one message")
    return tuple(_read_message(one, number) for number, one in enumerate(value))


def _read_message(value: object, number: int) -> Message:
    where = f"messages[{number}]"
    if not isinstance(value, dict):
        raise MessageError(f"{where} must be an object")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise MessageError(f"{where}.role must be one of {', '.join(_ROLES)}, not {role!r:.40}")
    _check_keys(value, where)
    message: Message = {"role": _ROLES[role], "content": _text_of(value.get("content"), where)}
    if role == "assistant":
        reasoning = value.get("reasoning_content") or value.get("reasoning")
        if reasoning:
            message["reasoning_content"] = str(reasoning)
        if value.get("tool_calls"):
            message["tool_calls"] = _read_calls(value["tool_calls"], where)
    if role == "tool":
        for key in _OF_RESULTS:
            if value.get(key):
                message[key] = str(value[key])
    return message


def _check_keys(value: Mapping[str, Any], where: str) -> None:
    """Raise :class:`MessageError` for what a message says that would be lost."""
    role = value["role"]
    known = {"role", "content"}
    if role == "assistant":
        known |= _OF_ANSWERS
    if role == "tool":
        known |= _OF_RESULTS
    for key, given in value.items():
        if given and key not in known | _HARMLESS:
            raise MessageError(f"{where}.{key} of the role {role} is not supported")


def _text_of(content: object, where: str) -> str:
    """Return the text of a message, whose content may be a text, nothing, or parts of text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MessageError(f"{where}.content must be a text or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise MessageError(f"{where}.content: only text is supported, not {kind!r:.40}")
        texts.append(part["text"])
    return "".join(texts)


def _read_calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise MessageError(f"{where}.tool_calls must be a list")
    calls = []
    for one in value:
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError(f"{where}.tool_calls: a call is a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments) if arguments.strip() else {}
            except ValueError as error:
                raise MessageError(
                    f"{where}.tool_calls: arguments of {function['name']!r:.40} are not JSON "
                    f"({one_line(error, 80)})"
                ) from None
        if not isinstance(arguments, dict):
            raise MessageError(f"{where}.tool_calls: arguments must be an object")
        calls.append(_call(str(one.get("id") or ""), function["name"], arguments))
    return calls


def _call(name_of_call: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
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


def split_reasoning(text: str, tags: ThinkingTags | None, prompt_end: bytes) -> tuple[str, str]:
    """Return the thinking of a text, without its tags, and the rest."""
    content = text.encode(errors="surrogatepass")
    start = answer_start(content, tags, prompt_end)
    if start == 0 or tags is None:
        return "", text
    if start is None:
        return _without_tags(text, tags), ""
    thinking = content[:start].decode(errors="replace")
    answer = content[start:].decode(errors="replace")
    return _without_tags(thinking, tags), answer.lstrip("\n")


def _without_tags(text: str, tags: ThinkingTags) -> str:
    opening, end = tags.opening.decode(), tags.end.decode()
    return text.strip().removeprefix(opening).removesuffix(end).strip()


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
        calls.append(_call(f"call_{name}_{number}", value["name"], arguments))
    return calls
