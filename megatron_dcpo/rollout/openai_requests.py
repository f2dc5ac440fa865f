"""Parses OpenAI requests: every field is honored or refused by name; sampling options are the
run's, counted and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.rollout.chat_messages import MessageError, read_messages
from megatron_dcpo.rollout.sessions import AskedCall

MOST_CHOICES = 16
_MOST_STOPS = 16
_LONGEST_STOP = 256

# how tokens are sampled: the run says that, not the request
SAMPLING = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "length_penalty", "typical_p"),
        *("reasoning_effort", "verbosity", "parallel_tool_calls"),
    )
)
# these say nothing to the policy
_HARMLESS = frozenset(
    (
        *("model", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prediction", "cache_salt", "request_id"),
    )
)
# these are taken with the values that ask for nothing
_TAKEN_AS: Mapping[str, tuple[object, ...]] = {
    "logit_bias": (None, {}),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "functions": (None, []),
    "function_call": (None, "auto", "none"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "best_of": (None, 1),
    "include_stop_str_in_output": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "chat_template_kwargs": (None, {}),
}
_READ = frozenset(
    (
        *("messages", "tools", "prompt", "stop", "n", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens", "logprobs", "return_token_ids"),
    )
)


@dataclass(frozen=True)
class OpenAIRequest:
    """A request: what it asks for, and how its answer is shown."""

    asked: AskedCall
    streams: bool
    with_usage: bool
    with_logprobs: bool
    with_token_ids: bool


def read_request(body: object, *, is_chat: bool) -> OpenAIRequest:
    """Return a request. Raises :class:`MessageError`, which names the field."""
    if not isinstance(body, dict):
        raise MessageError("the body must be a JSON object")
    ignored = _check_fields(body)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise MessageError("stream_options must be an object")
    logprobs = body.get("logprobs")
    if not is_chat and logprobs not in (None, 0, 1, False, True):
        raise MessageError("logprobs: only those of the sampled tokens are known; set it to 1")
    return OpenAIRequest(
        asked=_read_asked(body, ignored, is_chat=is_chat),
        streams=_flag(body, "stream"),
        with_usage=bool((options or {}).get("include_usage")),
        with_logprobs=logprobs is not None and logprobs is not False,
        with_token_ids=_flag(body, "return_token_ids"),
    )


def _check_fields(body: Mapping[str, Any]) -> int:
    """Return how many options of the sampling a request sets. Raises :class:`MessageError` for a
    field that is not known, or not supported.
    """
    ignored = 0
    for name, value in body.items():
        if name in _READ or name in _HARMLESS:
            continue
        if name in SAMPLING:
            ignored += value is not None
        elif name in _TAKEN_AS:
            if value not in _TAKEN_AS[name]:
                raise MessageError(f"{name}={value!r:.60} is not supported by a policy in training")
        elif value is not None:
            raise MessageError(f"{name!r:.60} is not known")
    return ignored


def _read_asked(body: Mapping[str, Any], ignored: int, *, is_chat: bool) -> AskedCall:
    most = body.get("max_completion_tokens")
    if most is None:
        most = body.get("max_tokens")
    if most is not None and (type(most) is not int or most < 1):
        raise MessageError(f"max_tokens={most!r:.40} must be a count")
    choices = body.get("n")
    if choices is None:
        choices = 1
    if type(choices) is not int or not 1 <= choices <= MOST_CHOICES:
        raise MessageError(f"n={choices!r:.40} must be from 1 to {MOST_CHOICES}")
    common: dict[str, Any] = {
        "max_tokens": most,
        "stop": _read_stop(body.get("stop")),
        "choices": choices,
        "ignored": ignored,
    }
    if is_chat:
        messages = read_messages(body.get("messages"))
        return AskedCall(messages=messages, tools=_read_tools(body.get("tools")), **common)
    return _read_prompt(body, common)


def _read_prompt(body: Mapping[str, Any], common: Mapping[str, Any]) -> AskedCall:
    for name in ("messages", "tools"):
        if body.get(name):
            raise MessageError(f"{name} are for /v1/chat/completions")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return AskedCall(text=prompt, **common)
    if isinstance(prompt, list) and all(type(one) is int for one in prompt):
        return AskedCall(token_ids=tuple(prompt), **common)
    raise MessageError("prompt must be one text, or one list of token ids")


def _read_stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS:
        raise MessageError(f"stop must be a text or a list of at most {_MOST_STOPS}")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= _LONGEST_STOP:
            raise MessageError(f"stop: a text has from 1 to {_LONGEST_STOP} characters")
    return tuple(texts)


def _read_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Return the tools of a request without ``strict``, which nobody enforces here."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise MessageError("tools must be a list")
    tools = []
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError("tools: only functions with a name are supported")
        if tool.get("type", "function") != "function":
            raise MessageError(f"tools: {tool['type']!r:.40} is not supported, only function")
        described = {name: given for name, given in function.items() if name != "strict"}
        tools.append({"type": "function", "function": described})
    return tuple(tools)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise MessageError(f"{name} must be true or false")
    return bool(value)


def stop_seeker(
    stop: tuple[str, ...], piece_of: Callable[[int], bytes]
) -> Callable[[int], bool] | None:
    """Return a function that is told each token, and says whether a stop text is complete with it;
    None without stop texts.
    """
    if not stop:
        return None
    texts = [text.encode() for text in stop]
    longest = max(map(len, texts))
    tail = b""

    def is_complete(token: int) -> bool:
        nonlocal tail
        piece = piece_of(token)
        tail = tail[-(longest - 1) :] + piece if longest > 1 else piece
        return any(text in tail for text in texts)

    return is_complete
