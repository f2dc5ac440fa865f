"""Answers in OpenAI's form: whole, or as a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.openai_requests import OpenAIRequest
from megatron_dcpo.rollout.sessions import Turn


def reply_body(
    turns: Sequence[Turn], request: OpenAIRequest, chat: ChatTokens, model: str
) -> dict[str, Any]:
    """Return the answer to a request: the ``turns`` are its choices."""
    is_chat = turns[0].call.is_chat
    prompt_ids = turns[0].prompt.token_ids
    sampled = sum(len(turn.sampled) for turn in turns)
    digest, _, nth = turns[0].name.rpartition("/")
    body: dict[str, Any] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest.rpartition('/')[2]}-{nth}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": turns[0].created,
        "model": model,
        "choices": [_choice(turn, number, request, chat) for number, turn in enumerate(turns)],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": sampled,
            "total_tokens": len(prompt_ids) + sampled,
        },
    }
    if request.return_token_ids:
        body["prompt_token_ids"] = list(prompt_ids)
    return body


def _choice(turn: Turn, number: int, request: OpenAIRequest, chat: ChatTokens) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": number, "finish_reason": turn.finish_reason}
    if turn.call.is_chat:
        message = _as_message(turn)
        if "tool_calls" in message:
            choice["finish_reason"] = "tool_calls"
        choice["message"] = message
    else:
        choice["text"] = turn.answer
    choice["logprobs"] = None if request.logprobs is False else _logprobs(turn, chat)
    if request.return_token_ids:
        choice["token_ids"] = turn.sampled.tolist()
    return choice


def _as_message(turn: Turn) -> dict[str, Any]:
    """Return an answer with the arguments of its calls as JSON texts."""
    reply = turn.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply["content"], "refusal": None}
    if "reasoning_content" in reply:
        message["reasoning_content"] = reply["reasoning_content"]
    if "tool_calls" in reply:
        message["content"] = reply["content"] or None
        calls = []
        for call in reply["tool_calls"]:
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append({**call, "function": {"name": function["name"], "arguments": arguments}})
        message["tool_calls"] = calls
    return message


def _logprobs(turn: Turn, chat: ChatTokens) -> dict[str, Any]:
    """Return the log-probs of the tokens of an answer."""
    ids = turn.sampled[: turn.answer_tokens]
    pieces = chat.tokens.pieces(ids)
    texts = [piece.decode(errors="replace") for piece in pieces]
    values = turn.logprobs[: turn.answer_tokens].tolist()
    if turn.call.is_chat:
        content = []
        for text, piece, value in zip(texts, pieces, values, strict=True):
            content.append(
                {"token": text, "logprob": value, "bytes": list(piece), "top_logprobs": []}
            )
        return {"content": content, "refusal": None}
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": None,
        "text_offset": offsets[: len(texts)],
    }


def events(body: dict[str, Any], *, with_usage: bool) -> Iterator[bytes]:
    """Yield an answer as server-sent events: each choice in one piece, then how it ended."""
    head = {name: body[name] for name in ("id", "created", "model")}
    is_chat = body["object"] == "chat.completion"
    head["object"] = "chat.completion.chunk" if is_chat else "text_completion"
    for choice in body["choices"]:
        yield _event({**head, "choices": [_first_piece(choice)]})
        end: dict[str, Any] = {"index": choice["index"]}
        end["finish_reason"] = choice["finish_reason"]
        if is_chat:
            end["delta"] = {}
        else:
            end["text"] = ""
        yield _event({**head, "choices": [end]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": body["usage"]})
    yield b"data: [DONE]\n\n"


def _first_piece(choice: dict[str, Any]) -> dict[str, Any]:
    piece = {name: value for name, value in choice.items() if name != "message"}
    piece["finish_reason"] = None
    message = choice.get("message")
    if message is None:
        return piece
    delta = {name: value for name, value in message.items() if name != "refusal"}
    if "tool_calls" in delta:
        calls = enumerate(delta["tool_calls"])
        delta["tool_calls"] = [{"index": number, **call} for number, call in calls]
    piece["delta"] = delta
    return piece


def _event(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def error_body(status: int, code: str, words: str, field: str = "") -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": words, "type": kind, "param": field or None, "code": code}}
