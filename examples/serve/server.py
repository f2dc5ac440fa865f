"""A small OpenAI-compatible server of the transformers engine, for a machine without a GPU:

    python examples/serve/server.py --model examples/quickstart/policy --port 8000

It answers /v1/models, /v1/completions and, if the tokenizer has a chat template,
/v1/chat/completions, with log-probs of the raw logits. Requests that come together are sampled
together, to their end; a stream has the whole text in one event. For this machine alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_dcpo.data.prompts import encode_chat
from megatron_dcpo.errors import EXIT_USER_ERROR, UserError
from megatron_dcpo.judging.judge import with_text
from megatron_dcpo.judging.token_bytes import token_bytes
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.tokens import load_tokenizer
from megatron_dcpo.rollout.transformers_engine import TransformersEngine
from megatron_dcpo.runtime.device import set_threads
from megatron_dcpo.types import Prompt
from megatron_dcpo.types import Response as Sampled

_QUIET_SECONDS = 0.02  # without a further request before those that are there are sampled
_MOST_LOGPROBS = 20


_MOST_CHOICES = 128
_MOST_BYTES = 4 << 20  # of a request


class RefusedError(ValueError):
    """A request that this server does not take; ``param`` is what is wrong in it."""

    def __init__(self, words: str, param: str | None = None) -> None:
        super().__init__(words)
        self.param = param


@dataclass(frozen=True)
class Job:
    """A sample that somebody waits for."""

    prompt: Prompt
    seed: int
    sampling: SamplingConfig
    answer: Future[Sampled]


class Sampler:
    """Samples jobs in a thread of its own, alike ones together."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="sampling", daemon=True).start()

    def _work(self) -> None:
        while True:
            together = [self.jobs.get()]
            with suppress(queue.Empty):
                while True:
                    together.append(self.jobs.get(timeout=_QUIET_SECONDS))
            alike: dict[SamplingConfig, list[Job]] = {}
            for job in together:
                alike.setdefault(job.sampling, []).append(job)
            for sampling, jobs in alike.items():
                self._sample(sampling, jobs)

    def _sample(self, sampling: SamplingConfig, jobs: Sequence[Job]) -> None:
        waiting: dict[tuple[str, int], list[Job]] = {}
        for job in jobs:
            waiting.setdefault((job.prompt.prompt_id, job.seed), []).append(job)
        asked = [(same[0].prompt, same[0].seed) for same in waiting.values()]
        try:
            for responses in self.engine.stream(asked, sampling):
                for response in responses:
                    for job in waiting.pop(response.key):
                        job.answer.set_result(response)
        except Exception as error:  # for those who wait; the next ones may be luckier
            for job in itertools.chain.from_iterable(waiting.values()):
                job.answer.set_exception(error)


class Server:
    """The paths of the server."""

    def __init__(self, model: str, name: str, engine: TransformersEngine) -> None:
        self.model = model
        self.name = name
        self.sampler = Sampler(engine)
        self.eos_ids = engine.eos_token_ids
        self.tokenizer = load_tokenizer(model)
        self.tokens = token_bytes(self.tokenizer)
        self.longest = int(engine.model.config.max_position_embeddings)
        self.numbers = itertools.count(1)
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/health", self.health),
            ]
        )

    async def models(self, request: Request) -> Response:
        row = {"id": self.name, "object": "model", "root": self.model}
        return JSONResponse({"object": "list", "data": [row]})

    async def health(self, request: Request) -> Response:
        return JSONResponse({})

    async def complete(self, request: Request) -> Response:
        """Answer a request for completions."""
        is_chat = request.url.path.endswith("/chat/completions")
        try:
            body = await _body_of(request)
            choices = await self._choices(body, is_chat)
        except (UserError, ValueError, LookupError, TypeError) as error:
            return _refusal(error)
        number = next(self.numbers)
        reply: dict[str, Any] = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{number}",
            "object": "chat.completion" if is_chat else "text_completion",
            "model": self.name,
            "choices": choices,
        }
        if not body.get("stream"):
            return JSONResponse(reply)
        if is_chat:
            reply["object"] = "chat.completion.chunk"
            for choice in choices:
                choice["delta"] = choice.pop("message")
        events = [f"data: {json.dumps(reply)}\n\n", "data: [DONE]\n\n"]
        return StreamingResponse(iter(events), media_type="text/event-stream")

    async def _choices(self, body: dict[str, Any], is_chat: bool) -> list[Any]:
        self._check_model(body)
        ids = self._token_ids(body, is_chat)
        room = self.longest - len(ids)
        if room < 1:
            raise RefusedError(
                f"the prompt has {len(ids)} tokens; the maximum context length is {self.longest}",
                "messages" if is_chat else "prompt",
            )
        longest = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        sampling = SamplingConfig(
            temperature=_number(body, "temperature", 1.0, least=0, most=100),
            top_p=_number(body, "top_p", 1.0, least=1e-6, most=1),
            top_k=max(0, _whole(body, "top_k", 0, least=-1)),
            max_tokens=min(_whole(body, longest, room, least=1), room),
            raw_logprobs=True,
            top_logprobs=self._tops(body, is_chat),
        )
        prompt = Prompt(str(ids), (), tuple(ids), "", "")
        seed = _whole(body, "seed", -1, least=-1)
        waited = []
        for index in range(_whole(body, "n", 1, least=1, most=_MOST_CHOICES)):
            job = Job(
                prompt=prompt,
                seed=next(self.numbers) if seed < 0 else seed + index,
                sampling=sampling,
                answer=Future(),
            )
            self.sampler.jobs.put(job)
            waited.append(asyncio.wrap_future(job.answer))
        sampled = await asyncio.gather(*waited)
        return [
            self._choice(index, with_text(one, self.tokens, self.eos_ids), body, is_chat)
            for index, one in enumerate(sampled)
        ]

    def _check_model(self, body: dict[str, Any]) -> None:
        model = body.get("model", self.name)
        if model != self.name:
            raise RefusedError(f"the model is {self.name}, not {model!r:.80}", "model")

    def _token_ids(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        name = "messages" if is_chat else "prompt"
        prompt = body.get(name)
        if not prompt:
            raise RefusedError(f"{name} is missing or empty", name)
        if is_chat:
            if self.tokenizer.chat_template is None:
                raise RefusedError("the model has no chat template; ask /v1/completions", name)
            return encode_chat(self.tokenizer, tuple(prompt))
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if not isinstance(prompt, list) or not all(type(one) is int for one in prompt):
            raise RefusedError("a prompt is one text, or the ids of its tokens", name)
        vocabulary = len(self.tokens.table)
        if not all(0 <= token < vocabulary for token in prompt):
            raise RefusedError(f"the ids of tokens are below {vocabulary}", name)
        return list(prompt)

    def _tops(self, body: dict[str, Any], is_chat: bool) -> int:
        if is_chat:
            return _whole(body, "top_logprobs", 0, least=0, most=_MOST_LOGPROBS)
        if isinstance(body.get("logprobs"), bool):
            raise RefusedError("logprobs is a number for completions", "logprobs")
        return _whole(body, "logprobs", 0, least=0, most=_MOST_LOGPROBS)

    def _choice(
        self, index: int, sampled: Sampled, body: dict[str, Any], is_chat: bool
    ) -> dict[str, Any]:
        logged = None
        if body.get("logprobs") is not None and body["logprobs"] is not False:
            logged = self._logged(sampled, is_chat)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": sampled.finish_reason,
            "logprobs": logged,
        }
        if is_chat:
            choice["message"] = {"role": "assistant", "content": sampled.text}
        else:
            choice["text"] = sampled.text
        return choice

    def _logged(self, sampled: Sampled, is_chat: bool) -> dict[str, Any]:
        """Return the log-probs of the tokens, the end token among them."""
        pieces = self.tokens.pieces(sampled.token_ids)
        values = sampled.logprobs.tolist()
        tops = [[] for _ in pieces]
        if sampled.top_logprobs is not None:
            tops = sampled.top_logprobs.tolist()
        words = [piece.decode(errors="replace") for piece in pieces]
        if not is_chat:
            named = [{f"top{rank}": value for rank, value in enumerate(row)} for row in tops]
            return {
                "tokens": words,
                "token_logprobs": values,
                "top_logprobs": named if sampled.top_logprobs is not None else None,
            }
        content = []
        for word, piece, value, row in zip(words, pieces, values, tops, strict=True):
            others = [{"token": "", "logprob": other} for other in row]
            content.append(
                {"token": word, "bytes": list(piece), "logprob": value, "top_logprobs": others}
            )
        return {"content": content}


async def _body_of(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > _MOST_BYTES:
            raise RefusedError(f"the body has more than {_MOST_BYTES >> 20} MB")
    body = json.loads(bytes(content))
    if not isinstance(body, dict):
        raise RefusedError("the body is a JSON object")
    return body


def _refusal(error: Exception) -> Response:
    """Return an error in the form of OpenAI's."""
    words = {
        "message": str(error) or type(error).__name__,
        "type": "invalid_request_error",
        "param": getattr(error, "param", None),
        "code": None,
    }
    return JSONResponse({"error": words}, status_code=400)


def _number(
    body: dict[str, Any], name: str, default: float, least: float, most: float = math.inf
) -> float:
    """Return a number of a request, ``default`` if it is not there or null."""
    value = body.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        bounds = f"from {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise RefusedError(f"{name} is a number {bounds}, not {value!r:.40}", name)
    return float(value)


def _whole(
    body: dict[str, Any], name: str, default: int, least: int, most: float = math.inf
) -> int:
    """Return a whole number of a request, ``default`` if it is not there or null."""
    value = _number(body, name, default, least, most)
    if value != int(value):
        raise RefusedError(f"{name} is a whole number, not {value:g}", name)
    return int(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--name", default="policy", help="name of the model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(argv)
    set_threads()
    try:
        engine = TransformersEngine.from_pretrained(args.model)
        server = Server(args.model, args.name, engine)
    except (UserError, OSError) as error:
        print(f"server.py: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    uvicorn.run(server.app, host=args.host, port=args.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
