"""An OpenAI-compatible server that stands for the upstream of ``dcpo serve``: what it says, how it
cuts it into tokens and how it fails are attributes. It remembers what it was asked, and which of
its streams were ended by the client.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

ANSWER = "2*3 is \\boxed{6}\n<conf> Confidence: 0.83"


class Served:
    """An ASGI application on a free port, in a thread of its own."""

    def __init__(self, app: Any) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.listening.getsockname()[1]
        config = uvicorn.Config(
            app, log_level="error", access_log=False, timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.listening]}, daemon=True
        )

    def __enter__(self) -> Served:
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        self.listening.close()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"


def asks(body: dict[str, Any]) -> bool:
    """Whether a request asks for log-probs; 0 is a number of alternatives."""
    return body.get("logprobs") is not None and body["logprobs"] is not False


def cut(text: str, size: int = 3) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


class Upstream:
    """``says(body, index)``: the text of a choice. ``tokens(text)``: its tokens. ``logs``: whether
    log-probs are returned; ``refuses_logprobs``: whether asking for them is an error. ``breaks``:
    after so many events, the stream ends without its rest. ``pause``: seconds between events.
    """

    def __init__(self) -> None:
        self.says: Callable[[dict[str, Any], int], str] = lambda body, index: ANSWER
        self.tokens: Callable[[str], list[str]] = cut
        self.logs = True
        self.refuses_logprobs = False
        self.finish_reason = "stop"
        self.error: tuple[int, Any] | None = None
        self.breaks: int | None = None
        self.pause = 0.0
        self.model = "policy"
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.left = 0  # streams that the client has ended
        self.tool = False
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/embeddings", self.other, methods=["POST"]),
            Route("/health", self.health),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        row = {"id": self.model, "object": "model", "root": f"/models/{self.model}"}
        return JSONResponse({"object": "list", "data": [row]})

    async def health(self, request: Request) -> Response:
        return PlainTextResponse("well", headers={"x-own": "yes"})

    async def other(self, request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")

    async def complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        self.headers.append(dict(request.headers))
        if self.error is not None:
            status, content = self.error
            return JSONResponse(content, status_code=status)
        if self.refuses_logprobs and asks(body):
            words = "this model does not support logprobs"
            return JSONResponse({"error": {"message": words}}, status_code=400)
        is_chat = "messages" in body
        if body.get("stream"):
            return StreamingResponse(self.events(body, is_chat), media_type="text/event-stream")
        await asyncio.sleep(self.pause)
        choices = [self.choice(body, i, is_chat) for i in range(body.get("n") or 1)]
        return JSONResponse({**self.head(is_chat), "choices": choices, "usage": {}})

    def head(self, is_chat: bool, chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{len(self.asked)}"
        return {"id": name, "object": kind, "created": 1, "model": self.model}

    def wants(self, body: dict[str, Any]) -> bool:
        return self.logs and asks(body)

    def choice(self, body: dict[str, Any], index: int, is_chat: bool) -> dict[str, Any]:
        text = self.says(body, index)
        logged = None
        if self.wants(body):
            logged = self.logged(self.tokens(text), body, is_chat)
        end = {"index": index, "finish_reason": self.finish_reason, "logprobs": logged}
        if not is_chat:
            return {"text": text, **end}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.tool:
            call = {
                "id": "call-1",
                "type": "function",
                "function": {"name": "f", "arguments": "{}"},
            }
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            end["finish_reason"] = "tool_calls"
        return {"message": message, **end}

    def logged(self, tokens: list[str], body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
        """Log-probs that depend on the token, with as many alternatives as were asked for."""
        values = [-0.01 * (1 + len(token) + ord(token[0]) % 7) for token in tokens]
        tops = body.get("top_logprobs" if is_chat else "logprobs") or 0
        if not is_chat:
            rows = [
                {token: value, **{f"alt{k}": value - 1 - k for k in range(tops - 1)}}
                for token, value in zip(tokens, values, strict=True)
            ]
            return {
                "tokens": tokens,
                "token_logprobs": values,
                "top_logprobs": rows if tops else None,
                "text_offset": list(range(len(tokens))),
            }
        content = []
        for token, value in zip(tokens, values, strict=True):
            others = [
                {"token": f"alt{k}", "logprob": value - k, "bytes": None} for k in range(tops)
            ]
            row = {
                "token": token,
                "logprob": value,
                "bytes": list(token.encode()),
                "top_logprobs": others,
            }
            content.append(row)
        return {"content": content}

    async def events(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[bytes]:
        """One token an event, the choices in turns."""
        count = body.get("n") or 1
        texts = [self.tokens(self.says(body, index)) for index in range(count)]
        sent = 0
        try:
            for position in range(max(map(len, texts))):
                for index, tokens in enumerate(texts):
                    if position >= len(tokens):
                        continue
                    if self.breaks is not None and sent >= self.breaks:
                        raise RuntimeError("the upstream dies")
                    logged = None
                    if self.wants(body):
                        logged = self.logged([tokens[position]], body, is_chat)
                    reason = None
                    if position + 1 == len(tokens):
                        reason = self.finish_reason
                    choice: dict[str, Any] = {
                        "index": index,
                        "finish_reason": reason,
                        "logprobs": logged,
                    }
                    if is_chat:
                        choice["delta"] = {"content": tokens[position]}
                    else:
                        choice["text"] = tokens[position]
                    chunk = {**self.head(is_chat, True), "choices": [choice]}
                    yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
                    sent += 1
                    await asyncio.sleep(self.pause)
            yield b": a comment\n\n"
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.left += 1
            raise


def events_of(content: bytes) -> list[Any]:
    """The JSON of each event of a stream, its last word and comments as they are."""
    found: list[Any] = []
    for event in re.split(rb"\n\n", content):
        if event.startswith(b"data: {"):
            found.append(json.loads(event[6:]))
        elif event:
            found.append(event)
    return found


def chunks_of(events: list[Any]) -> list[dict[str, Any]]:
    """Those of the events that have choices."""
    return [event for event in events if isinstance(event, dict) and "choices" in event]
