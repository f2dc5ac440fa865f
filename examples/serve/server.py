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
from megatron_dcpo.rollout import SamplingConfig, TransformersEngine, load_tokenizer
from megatron_dcpo.runtime.device import set_threads
from megatron_dcpo.types import Prompt
from megatron_dcpo.types import Response as Sampled

_QUIET_SECONDS = 0.02  # without a further request before those that are there are sampled
_MOST_LOGPROBS = 20


class RefusedError(ValueError):
    """A request that this server does not take."""


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
            body = json.loads(await request.body())
            choices = await self._choices(body, is_chat)
        except (RefusedError, UserError, ValueError, LookupError, TypeError) as error:
            words = {"message": str(error), "type": "invalid_request_error"}
            return JSONResponse({"error": words}, status_code=400)
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
        ids = self._token_ids(body, is_chat)
        room = self.longest - len(ids)
        if room < 1:
            raise RefusedError(
                f"the prompt has {len(ids)} tokens; the maximum context length is {self.longest}"
            )
        sampling = SamplingConfig(
            temperature=float(body.get("temperature", 1.0)),
            top_p=float(body.get("top_p", 1.0)),
            top_k=max(0, int(body.get("top_k", 0))),
            max_tokens=min(int(body.get("max_tokens") or room), room),
            raw_logprobs=True,
            top_logprobs=self._tops(body, is_chat),
        )
        prompt = Prompt(str(ids), (), tuple(ids), "", "")
        seed = body.get("seed")
        waited = []
        for index in range(int(body.get("n") or 1)):
            job = Job(
                prompt=prompt,
                seed=next(self.numbers) if seed is None else int(seed) + index,
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

    def _token_ids(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        if is_chat:
            return encode_chat(self.tokenizer, tuple(body["messages"]))
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if not all(isinstance(one, int) for one in prompt):
            raise RefusedError("a prompt is one text, or the ids of its tokens")
        return list(prompt)

    def _tops(self, body: dict[str, Any], is_chat: bool) -> int:
        tops = body.get("top_logprobs" if is_chat else "logprobs") or 0
        if not 0 <= int(tops) <= _MOST_LOGPROBS:
            raise RefusedError(f"at most {_MOST_LOGPROBS} log-probs of a token")
        return int(tops)

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
