"""The requests that agents send, in OpenAI's form, as pydantic reads them: a field that is not
known, or asks for what a policy in training does not do, is refused by its name; options of the
sampling are the run's, so they are counted and ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)

from megatron_dcpo.errors import validated_name, validation_message
from megatron_dcpo.rollout.chat_messages import Message, tool_call
from megatron_dcpo.rollout.sessions import Call, CallRefused
from megatron_dcpo.runtime.text import parse_json

MOST_CHOICES = 16
_MOST_STOPS = 16
_LONGEST_STOP = 256
_MOST_FIELDS = 100
_SHOWN = 300  # characters of why a request is refused


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_object(arguments: object) -> object:
    if isinstance(arguments, str):
        return parse_json(arguments) if arguments.strip() else {}
    return arguments


def _with_name(function: dict[str, Any]) -> dict[str, Any]:
    """Return a described function without ``strict``, which nobody enforces here."""
    if not isinstance(function.get("name"), str):
        raise ValueError("a function has a name")
    return {name: given for name, given in function.items() if name != "strict"}


def _one_prompt(prompt: Any) -> str | tuple[int, ...]:  # noqa: ANN401 -- JSON
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(one) is int for one in prompt):
        return tuple(prompt)
    raise ValueError("must be one text, or one list of token ids")


class _Part(BaseModel):
    """A part of a request whose further fields say nothing to the policy. A list of parts is read
    up to the first that is wrong, so that a large request is refused as soon as a small one.
    """

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: object) -> object:
        """Leave out what a client writes for a field that it does not set."""
        if not isinstance(value, dict):
            return value
        if len(value) > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS} fields")
        return {name: one for name, one in value.items() if one is not None}


class _TextPart(_Part):
    type: Literal["text"]
    text: str


class _CalledFunction(_Part):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_as_object)]


class _ToolCall(_Part):
    id: str = ""
    function: _CalledFunction


class _Tool(_Part):
    type: Literal["function"] = "function"
    function: Annotated[dict[str, Any], AfterValidator(_with_name)]


class ChatMessage(_Part):
    """A message of a request: no field that the policy would have to read is lost."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_TextPart], FailFast(), BeforeValidator(_as_parts)] = []
    name: str = ""  # of who speaks, which no chat template writes, or of the tool
    tool_calls: Annotated[list[_ToolCall], FailFast()] = []
    reasoning_content: str = ""
    reasoning: str = ""
    tool_call_id: str = ""
    # say nothing to the policy
    annotations: Any = None
    refusal: Any = None
    id: Any = None
    status: Any = None
    timestamp: Any = None
    cache_control: Any = None

    @model_validator(mode="before")
    @classmethod
    def _not_empty(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if one or name == "content"}

    @model_validator(mode="after")
    def _of_its_role(self) -> ChatMessage:
        others = {"tool_calls": "assistant", "reasoning_content": "assistant"}
        others |= {"reasoning": "assistant", "tool_call_id": "tool"}
        for name, role in others.items():
            if role != self.role and name in self.model_fields_set:
                raise ValueError(f"{name} is not for the role {self.role}")
        return self

    @property
    def has_ignored_name(self) -> bool:
        return bool(self.name) and self.role != "tool"

    def as_read(self) -> Message:
        """Return the message in the form that chat templates read."""
        role = "system" if self.role == "developer" else self.role
        message: Message = {"role": role, "content": "".join(part.text for part in self.content)}
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                tool_call(one.id, one.function.name, one.function.arguments)
                for one in self.tool_calls
            ]
        if self.role == "tool":
            for name in ("tool_call_id", "name"):
                if getattr(self, name):
                    message[name] = getattr(self, name)
        return message


class _Sampling(_Part):
    """How tokens are sampled: the run says that."""

    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    length_penalty: Any = None
    typical_p: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    parallel_tool_calls: Any = None


class _WithoutMeaning(_Part):
    """What says nothing to the policy, and what may only say that nothing is wanted."""

    model: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    cache_salt: Any = None
    request_id: Any = None
    logit_bias: dict[str, Any] = Field(default={}, max_length=0)
    top_logprobs: Literal[0] = 0
    response_format: dict[Literal["type"], Literal["text"]] = {}
    tool_choice: Literal["auto"] = "auto"
    functions: list[Any] = Field(default=[], max_length=0)
    function_call: Literal["auto", "none"] = "auto"
    modalities: Annotated[list[Literal["text"]], FailFast()] = []
    echo: Literal[False] = False
    suffix: Literal[""] = ""
    best_of: Literal[1] = 1
    include_stop_str_in_output: Literal[False] = False
    add_generation_prompt: Literal[True] = True
    continue_final_message: Literal[False] = False
    chat_template_kwargs: dict[str, Any] = Field(default={}, max_length=0)


_StopText = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
_Stops = Annotated[
    list[_StopText], FailFast(), BeforeValidator(_as_list), Field(max_length=_MOST_STOPS)
]


class OpenAIRequest(_Sampling, _WithoutMeaning):
    """What every request may say: how its answer ends, and how it is shown."""

    model_config = ConfigDict(extra="forbid", strict=True)

    stop: _Stops = []
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    logprobs: Literal[False, True, 0, 1] = False  # of the sampled tokens alone
    return_token_ids: bool = False

    def call(self) -> Call:
        """Return what is wanted of the policy."""
        return Call(
            max_tokens=self.max_completion_tokens or self.max_tokens,
            stop=tuple(self.stop),
            choices=self.n,
            ignored=len(self.model_fields_set & _Sampling.model_fields.keys()),
        )


class ChatRequest(OpenAIRequest):
    """A request to ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], FailFast(), Field(min_length=1)]
    tools: Annotated[list[_Tool], FailFast()] = []

    def call(self) -> Call:
        call = super().call()
        return replace(
            call,
            messages=tuple(message.as_read() for message in self.messages),
            tools=tuple(tool.model_dump() for tool in self.tools),
            ignored=call.ignored + any(message.has_ignored_name for message in self.messages),
        )


class CompletionRequest(OpenAIRequest):
    """A request to ``/v1/completions``."""

    prompt: Annotated[Any, AfterValidator(_one_prompt)]

    def call(self) -> Call:
        if isinstance(self.prompt, str):
            return replace(super().call(), text=self.prompt)
        return replace(super().call(), token_ids=self.prompt)


def read_request(content: bytes, kind: type[OpenAIRequest]) -> OpenAIRequest:
    """Return the request in a body. Raises :class:`CallRefused`, which names the field."""
    try:
        return kind.model_validate(parse_json(content.decode()))
    except ValidationError as error:
        words, field = validation_message(error), validated_name(error)
    except ValueError as error:
        words, field = str(error), ""
    raise CallRefused(400, "invalid_request_error", words[:_SHOWN], field)
