"""The confidence of an adapter of ``dcpo calibrate --kind adapter`` that the upstream serves under
a name of its own: what it states behind an answer of the base, read out exactly.

The numbers 0.00 to 1.00 are followed token by token, whatever the tokenizer: the upstream is asked
for the 20 most probable next tokens behind every beginning of a number that is probable itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_dcpo.errors import UserError
from megatron_dcpo.runtime.asgi import App, ClientLeftError, Message
from megatron_dcpo.runtime.served_models import ModelRow
from megatron_dcpo.serving import exact_json
from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.exact_json import compact
from megatron_dcpo.serving.finishing import why_not_whole
from megatron_dcpo.serving.relaying import UpstreamError, received, request_of
from megatron_dcpo.serving.scorer import Scored

TEXTS = tuple(f"{hundredth / 100:.2f}" for hundredth in range(101))
_BEGINNINGS = frozenset(text[:size] for text in TEXTS for size in range(len(text)))
_TOPS = 20
_LEAST = 1e-4  # a beginning that is less probable is not followed
_LEAST_MASS = 0.5  # below it the adapter states no number, and its mean says nothing
_MOST_BYTES = 1 << 20  # of the answer with one token
# options of the client's request that concern the prompt
_KEPT = ("chat_template_kwargs", "user")


class AdapterError(Exception):
    """The adapter cannot be asked."""


@dataclass(frozen=True)
class AdapterReader:
    """``name`` is that of the adapter at the upstream, ``base`` that of the model whose answers it
    reads, "" if the upstream does not say; ``marker`` is the confidence tag.
    """

    name: str
    base: str
    marker: str

    async def score(
        self,
        asked: Asked,
        choice: Mapping[str, Any],
        index: int,
        stated: Scored,
        app: App,
        scope: Message,
    ) -> Scored:
        """Return the confidence that the adapter states behind a choice, with what the choice
        ``stated`` itself as the raw one.
        """
        source = f"adapter {self.name}"
        reason = self._refusal(asked, choice)
        confidence = None
        if not reason:
            try:
                body = self._beginning(asked, choice, index)
                confidence = await self._read(body, asked, app, scope)
                if confidence is None:
                    reason = "adapter: it states no number there"
            except AdapterError as error:
                reason = f"adapter: {error}"
        return replace(stated, confidence=confidence, source=source, reason=reason)

    def _refusal(self, asked: Asked, choice: Mapping[str, Any]) -> str:
        """Return why a choice has no confidence, "" if nothing is known against it."""
        model = asked.body.get("model")
        if self.base and model not in (self.base, None):
            return f"mismatch: the model is {model}, the adapter's is {self.base}"
        if asked.refusal:
            return asked.refusal
        if not _text_of(asked, choice):
            return "no_text: the answer has no text, as a call of a tool has none"
        return why_not_whole(choice)

    def _beginning(self, asked: Asked, choice: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Return the request whose prompt ends with the answer, where the number begins. Raises
        :class:`AdapterError` if the prompt is not text.
        """
        answer = _text_of(asked, choice).partition(self.marker)[0].rstrip()
        text = f"{answer}\n{self.marker} Confidence: "
        body: dict[str, Any] = {key: asked.body[key] for key in _KEPT if key in asked.body}
        body |= {"model": self.name, "max_tokens": 1, "temperature": 0.0}
        if asked.api == "chat":
            messages = asked.body.get("messages")
            if not isinstance(messages, list):
                raise AdapterError("the request has no messages")
            spoken = {"role": "assistant", "content": text}
            body |= {
                "messages": [*messages, spoken],
                # options of vLLM: go on with the last message
                "continue_final_message": True,
                "add_generation_prompt": False,
                "logprobs": True,
                "top_logprobs": _TOPS,
            }
            return body
        prompt = asked.body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            prompt = _prompt_of(prompt, asked, index)
        if not isinstance(prompt, str):
            raise AdapterError("the prompt is token ids, behind which no text can be put")
        return {**body, "prompt": prompt + text, "logprobs": _TOPS}

    async def _read(
        self, body: Mapping[str, Any], asked: Asked, app: App, scope: Message
    ) -> float | None:
        """Return the expected confidence; None if the numbers are improbable altogether."""
        found: dict[str, float] = {}
        beginnings = {"": 1.0}
        while beginnings:
            tops = await asyncio.gather(
                *(
                    self._next_tokens(_behind(body, asked, text), asked, app, scope)
                    for text in beginnings
                )
            )
            grown: dict[str, float] = {}
            for (text, probability), tokens in zip(beginnings.items(), tops, strict=True):
                for token, logprob in tokens:
                    # the space before the number may belong to its first token
                    longer = text + (token if text else token.lstrip(" "))
                    share = probability * math.exp(min(logprob, 0.0))
                    if longer in TEXTS:
                        found[longer] = found.get(longer, 0.0) + share
                    elif longer in _BEGINNINGS and longer and share > _LEAST:
                        grown[longer] = grown.get(longer, 0.0) + share
            beginnings = grown
        mass = math.fsum(found.values())
        if mass < _LEAST_MASS:
            return None
        return math.fsum(float(text) * p for text, p in found.items()) / mass

    async def _next_tokens(
        self, body: Mapping[str, Any], asked: Asked, app: App, scope: Message
    ) -> list[tuple[str, float]]:
        """Return the most probable next tokens with their log-probs. Raises
        :class:`AdapterError`.
        """
        reply = await ask_app(app, scope, body)
        try:
            logged = reply["choices"][0]["logprobs"]
            if asked.api == "chat":
                rows = logged["content"][0]["top_logprobs"]
                found = [(str(row["token"]), float(row["logprob"])) for row in rows]
            else:
                rows = logged["top_logprobs"][0]
                found = [(str(token), float(value)) for token, value in rows.items()]
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
            raise AdapterError("the upstream returned no log-probs") from None
        if any(math.isnan(value) for _, value in found):
            raise AdapterError("the upstream returned log-probs that are no numbers")
        return found


def _prompt_of(prompts: Sequence[object], asked: Asked, index: int) -> object:
    """Return the prompt of a choice: each has as many as the request asks for. Raises
    :class:`AdapterError` for a choice that was not asked for.
    """
    choices = asked.choices
    if choices is None or not 0 <= index < choices:
        raise AdapterError("it is not known which prompt the choice answers")
    return prompts[index * len(prompts) // choices]


def _behind(body: Mapping[str, Any], asked: Asked, text: str) -> dict[str, Any]:
    """Return the request whose prompt has ``text`` in addition."""
    if asked.api != "chat":
        return {**body, "prompt": body["prompt"] + text}
    *before, spoken = body["messages"]
    longer = {**spoken, "content": spoken["content"] + text}
    return {**body, "messages": [*before, longer]}


def _text_of(asked: Asked, choice: Mapping[str, Any]) -> str:
    text = choice.get("text")
    if asked.api == "chat":
        message = choice.get("message")
        text = message.get("content") if isinstance(message, Mapping) else None
    return text if isinstance(text, str) else ""


async def ask_app(app: App, scope: Message, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply of an application to a request of our own, on the path and with the headers
    of the client's. Raises :class:`AdapterError`.
    """
    request, content = request_of(scope, compact(body))
    status = 0
    pieces: list[bytes] = []
    size = 0

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")

    async def send(message: Message) -> None:
        nonlocal status, size
        if message["type"] == "http.response.start":
            status = message["status"]
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > _MOST_BYTES:
            raise UpstreamError(f"the adapter's answer has more than {_MOST_BYTES} bytes")

    try:
        await app(request, received(content["body"], never), send)
        reply = exact_json.loads(b"".join(pieces))
    except (UpstreamError, ClientLeftError) as error:
        raise AdapterError(str(error)) from None
    except ValueError:
        raise AdapterError(f"HTTP {status} without JSON") from None
    if status != 200 or not isinstance(reply, dict):
        raise AdapterError(f"HTTP {status} {reply!r:.200}")
    return reply


def served_adapter(name: str, marker: str, rows: Sequence[ModelRow]) -> AdapterReader:
    """Return the reader of an adapter that the upstream lists among its models. Raises
    :class:`UserError` if it does not.
    """
    for row in rows:
        if row["id"] == name:
            return AdapterReader(name, str(row.get("parent") or ""), marker)
    offered = ", ".join(row["id"] for row in rows)
    raise UserError(
        f"--adapter {name}: the upstream offers {offered or 'no model'}; start it with the adapter "
        f"(vllm serve --enable-lora --lora-modules {name}=RUN/adapter)"
    )
