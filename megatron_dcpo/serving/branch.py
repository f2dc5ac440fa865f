"""The number behind one turn of an agent: as in a training with ``rollout.asks_confidence: turns``,
the model is asked for it on a branch that neither the client nor the next turn sees.

    prompt's ids + answer's ids + ids of "<conf> Confidence:"  --/v1/completions-->  " 0.83"

The upstream names the ids of its tokens (``return_token_ids`` of vLLM), and encodes and decodes
(``/tokenize``, ``/detokenize``), so that the tokens are those that the policy was trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dcpo.data.chat_template import PROMPT_TOKENS
from megatron_dcpo.judging.confidence import CONFIDENCE_TOKENS, confidence_line, parse_number
from megatron_dcpo.judging.replies import is_finished
from megatron_dcpo.judging.thinking import KNOWN
from megatron_dcpo.runtime.asgi import App, ClientLeftError, Message, Receive
from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.bounds import Bounds
from megatron_dcpo.serving.exchange import UpstreamError, exchange
from megatron_dcpo.serving.finishing import ends_with_token, why_cut
from megatron_dcpo.serving.json_text import compact, read_json
from megatron_dcpo.serving.scorer import Stated, why_malformed

# sends a body to a path of the upstream, and returns what the JSON of its answer is
Post = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
Lines = dict[tuple[object, str], list[int]]

_SAMPLING = ("model", "temperature", "top_p", "top_k", "seed")
_MOST_LINES = 64  # whose ids are kept; one model has two
# they name the client's request, which another one is not
_OF_ONE_REQUEST = (b"x-request-id", b"idempotency-key")


def poster(app: App, scope: Message, receive: Receive, bounds: Bounds) -> Post:
    """Return what posts to other paths of an application than that of a client's request, with the
    headers of that. It raises as :func:`exchange`, and :class:`UpstreamError` for a refusal, whose
    words may repeat the ids that were sent.
    """
    headers = [one for one in scope["headers"] if one[0] not in _OF_ONE_REQUEST]

    async def post(path: str, body: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- JSON
        there = {**scope, "path": path, "raw_path": path.encode(), "query_string": b""}
        there["headers"] = headers
        async with exchange(app, there, receive, compact(body)) as reply:
            content = await reply.whole(bounds.reply_bytes)
        if reply.status != 200:
            raise UpstreamError(f"HTTP {reply.status} of {path}")
        return read_json(content)

    return post


@dataclass(frozen=True)
class TurnBranch:
    """Asks for the numbers behind the choices of one reply, each within so many ``seconds``.
    ``lines`` are the ids of lines that are known by now, of all requests.
    """

    post: Post
    asked: Asked
    marker: str
    seconds: float
    lines: Lines

    async def stated(self, choice: Mapping[str, Any], prompt_ids: object) -> Stated | None:
        """Return what the model states behind a whole choice, or why it states nothing; None if it
        is not asked, because the answer has a confidence, or no text.
        """
        if cut := why_cut(choice, ("length",)):
            return Stated(None, cut)
        prompt = _ids(choice.get("prompt_token_ids") or prompt_ids)
        answer = _ids(choice.get("token_ids"))
        if not prompt or not answer:
            return Stated(None, "no_token_ids: the upstream returned no ids of tokens")
        if ends_with_token(choice):
            answer = answer[:-1]
        try:
            async with asyncio.timeout(self.seconds):
                return await self._ask(prompt, answer)
        except ClientLeftError:
            raise
        except Exception as error:  # whatever an application raises; the answer is there
            words = str(error) if isinstance(error, UpstreamError) else type(error).__name__
            return Stated(None, f"no_number: the upstream did not answer for it ({words})")

    async def _ask(self, prompt: list[int], answer: list[int]) -> Stated | None:
        prompt_end = await self._text(prompt[-PROMPT_TOKENS:])
        text = await self._text(answer)
        line = confidence_line(text, KNOWN[0], prompt_end.encode(errors="replace"), self.marker)
        if line is None:
            return None
        body = {name: self.asked.sent[name] for name in _SAMPLING if name in self.asked.sent}
        body["prompt"] = [*prompt, *answer, *await self._encoded(line)]
        body["max_tokens"] = CONFIDENCE_TOKENS
        body["skip_special_tokens"] = False
        reply = await self.post("/v1/completions", body)
        choice = reply["choices"][0]
        parsed = parse_number(_string(choice["text"]), self.marker, is_finished(choice))
        return Stated(parsed.confidence, why_malformed(parsed.status))

    async def _text(self, token_ids: list[int]) -> str:
        body = {"model": self.asked.sent.get("model"), "tokens": token_ids}
        return _string((await self.post("/detokenize", body))["prompt"])

    async def _encoded(self, line: str) -> list[int]:
        model = self.asked.sent.get("model")
        key = (model, line)
        if key not in self.lines:
            body = {"model": model, "prompt": line, "add_special_tokens": False}
            token_ids = _ids((await self.post("/tokenize", body))["tokens"])
            if not token_ids:
                raise UpstreamError("/tokenize names no ids")
            if len(self.lines) >= _MOST_LINES:
                return token_ids
            self.lines[key] = token_ids
        return self.lines[key]


def _ids(value: object) -> list[int]:
    """Return the ids of tokens, none for anything else."""
    if isinstance(value, list) and all(type(one) is int for one in value):
        return value
    return []


def _string(value: object) -> str:
    """Return a text. Raises :class:`TypeError` for anything else."""
    if not isinstance(value, str):
        raise TypeError
    return value
