"""Samples from an OpenAI-compatible server: concurrent, with retries, one request per sample.

A request that fails in a way that may pass is repeated (``runtime/http_json.py``), also an error
under the status 200 and a reply without choices. A prompt that is refused for what it holds (a
content filter, the length of the context) is an empty response with the server's words as its
``refusal``; any other answer is an error at once, with the server's own words. Finished samples are
handed over as soon as they are there, so that an interrupted evaluation loses none.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from megatron_dcpo.data.prompts import plain_text
from megatron_dcpo.errors import UserError, one_line
from megatron_dcpo.judging.replies import FEWEST_TOPS, UNREADABLE, response_of_choice
from megatron_dcpo.rollout.sampling import SamplingConfig, sample_seed
from megatron_dcpo.runtime.http_json import HttpError, JsonClient, may_pass
from megatron_dcpo.runtime.served_models import VERSIONED
from megatron_dcpo.types import Prompt, Response

# A reply is refused if it has more bytes than these for each log-prob and for everything else.
_TOKEN_BYTES = 1000
_OTHER_BYTES = 1 << 20

# Statuses of a refusal that may be the prompt's, and the words of servers that refuse it for what
# it holds (OpenAI, Azure, Gemini, DeepSeek, DashScope) or for its length (vLLM, SGLang, TGI,
# llama.cpp, Anthropic).
_OF_THE_PROMPT = frozenset({400, 403, 413, 422})
_TOO_LARGE = 413
_REFUSED_CONTENT = re.compile(
    r"content[ _-]?(filter|management|policy|exists risk)|invalid_prompt|moderation|safety"
    r"|usage polic|inappropriate content|data_?inspection",
    re.IGNORECASE,
)
_REFUSED_LENGTH = re.compile(
    r"context[ _-]?(length|size|window)|maximum (context|input|model|sequence|prompt) length"
    r"|(prompt|input|request|sequence)[^.]{0,40} (is |are )?(too|longer|exceed)"
    r"|max_model_len|max_total_tokens|tokens? count[^.]{0,40} exceed|must have less than \d+ tokens"
    r"|max_new_tokens` must be",
    re.IGNORECASE,
)
Result = TypeVar("Result")


class _Request(Protocol):
    @property
    def prompt(self) -> Prompt: ...

    @property
    def repeats(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Endpoint:
    """A server and how it is asked. ``url`` ends before ``/chat/completions``, usually in ``/v1``.

    With ``api`` ``chat``, messages are sent, to which the server applies its chat template; with
    ``completions``, the token ids of the prompt, or plain text if it has none. ``extra_body`` is
    added to every request as it is, for instance ``{"chat_template_kwargs": {"enable_thinking":
    false}}`` for Qwen3 in vLLM.
    """

    url: str
    model: str
    sampling: SamplingConfig
    api: Literal["chat", "completions"] = "chat"
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 32
    timeout: float = 600.0
    attempts: int = 8
    first_pause: float = 0.5
    longest_pause: float = 60.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def complete(self, requests: Sequence[_Request]) -> Iterator[list[Response]]:
        """Yield every repeat of every request in the order in which they finish, all finished ones
        at a time.
        """
        todo: queue.SimpleQueue[tuple[Prompt, int]] = queue.SimpleQueue()
        for request in requests:
            for repeat in request.repeats:
                todo.put((request.prompt, repeat))
        left = todo.qsize()
        stop = threading.Event()
        done: queue.SimpleQueue[Response | BaseException] = queue.SimpleQueue()
        for _ in range(min(self.concurrency, left)):
            threading.Thread(target=self._work, args=(todo, done, stop), daemon=True).start()
        try:
            while left:
                batch, failed = _drain(done)
                left -= len(batch)
                if batch:
                    yield batch  # before an error is raised: what is finished is kept
                if failed is not None:
                    raise failed
        finally:
            stop.set()

    def ask(self, prompt: Prompt, repeat: int, stop: threading.Event | None = None) -> Response:
        """Return one sample. One that is refused for its prompt is empty and has a ``refusal``.
        Raises :class:`UserError` if the server refuses for another reason, or cannot be reached in
        ``attempts`` attempts.
        """
        path = "/completions"
        if self.api == "chat":
            path = "/chat/completions"

        def read(reply: Mapping[str, Any]) -> Response:
            return response_of_choice(
                prompt_id=prompt.prompt_id,
                repeat=repeat,
                choice=reply["choices"][0],
                api=self.api,
                tops=self.sampling.top_logprobs,
            )

        try:
            return self._call(
                path=path,
                body=self._body(prompt, repeat),
                logprobs=self.sampling.max_tokens * (2 + self.sampling.top_logprobs),
                read=read,
                stop=stop,
            )
        except HttpError as refused:
            return _refused_response(prompt.prompt_id, repeat, str(refused))

    def _call(
        self,
        path: str,
        body: dict[str, Any],
        logprobs: int,
        read: Callable[[Any], Result],
        stop: threading.Event | None = None,
    ) -> Result:
        """Return ``read`` of the reply, which may hold at most that many log-probs. Raises
        :class:`HttpError` if the prompt is refused, :class:`UserError` for anything else.
        """
        try:
            client = JsonClient(
                url=self.url,
                api_key=self.api_key,
                timeout=self.timeout,
                attempts=self.attempts,
                first_pause=self.first_pause,
                longest_pause=self.longest_pause,
                max_reply_bytes=_OTHER_BYTES + logprobs * _TOKEN_BYTES,
            )
            reply = client.call(path, body, stop=stop, problem=_passing_problem)
        except HttpError as error:
            if _refuses_prompt(error):
                raise
            if error.status is not None:
                hint = _address_hint(self.url, error.status)
                raise UserError(f"{self.url}: {error}{hint}") from None
            raise UserError(
                f"{self.url}: no answer after {self.attempts} attempts ({error}); the same "
                "command continues"
            ) from None
        try:
            return read(reply)
        except UNREADABLE as error:
            why = client.without_key(f"{type(error).__name__}: {one_line(error)}")
            got = client.without_key(str(reply))
            raise UserError(f"{self.url}: unexpected reply ({why[:200]}): {got[:200]}") from None

    def _work(
        self,
        todo: queue.SimpleQueue[tuple[Prompt, int]],
        done: queue.SimpleQueue[Response | BaseException],
        stop: threading.Event,
    ) -> None:
        while not stop.is_set():
            try:
                prompt, repeat = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put(self.ask(prompt, repeat, stop))
            except BaseException as error:
                done.put(error)
                return

    def _body(self, prompt: Prompt, repeat: int) -> dict[str, Any]:
        sampling = self.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": sample_seed(sampling.seed, prompt.prompt_id, repeat),
        }
        if sampling.top_k:
            # not in OpenAI's API, but vLLM, SGLang and llama.cpp know it
            body["top_k"] = sampling.top_k
        if self.api == "chat":
            body["messages"] = list(prompt.messages)
            body["logprobs"] = True
            if sampling.top_logprobs:
                body["top_logprobs"] = sampling.top_logprobs
        else:
            body["prompt"] = list(prompt.token_ids) or plain_text(prompt.messages)
            body["logprobs"] = max(sampling.top_logprobs, FEWEST_TOPS)
        body.update(self.extra_body)
        return body


def _address_hint(url: str, status: int) -> str:
    """Return what to say of an address that the server does not know, if it lacks a version."""
    if status not in (404, 405) or VERSIONED.search(url.rstrip("/")):
        return ""
    return f"; most servers answer below /v1: try --endpoint {url.rstrip('/')}/v1"


def _passing_problem(reply: object) -> str:
    """Return why a reply with the status 200 has to be asked for again, "" if it need not: an error
    of the server behind it, or no choices.

    Raises :class:`HttpError` for an error with a status that will not pass.
    """
    if not isinstance(reply, Mapping):
        return ""
    choices = reply.get("choices")
    error = reply.get("error")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        error = choices[0].get("error") or error
        if not error or choices[0].get("message") or choices[0].get("text"):
            return ""
    if error:
        status = error.get("code") if isinstance(error, Mapping) else None
        words = f"HTTP 200 with the error {one_line(error)}"
        if type(status) is int and 400 <= status < 600 and not may_pass(status):
            raise HttpError(words, status)
        if _REFUSED_CONTENT.search(words) or _REFUSED_LENGTH.search(words):
            raise HttpError(words, 400)
        return words
    if choices in ([], None):
        return "a reply without choices"
    return ""


def _refuses_prompt(error: HttpError) -> bool:
    """Return whether a server refuses this prompt, and may take others."""
    if error.status not in _OF_THE_PROMPT:
        return False
    words = str(error)
    return (
        error.status == _TOO_LARGE
        or _REFUSED_CONTENT.search(words) is not None
        or _REFUSED_LENGTH.search(words) is not None
    )


def _refused_response(prompt_id: str, repeat: int, words: str) -> Response:
    return Response(
        prompt_id=prompt_id,
        sample_index=repeat,
        token_ids=np.empty(0, np.int64),
        logprobs=np.empty(0, np.float32),
        finish_reason="stop",
        weights_version=0,
        text="",
        refusal=words,
    )


def _drain(
    done: queue.SimpleQueue[Response | BaseException],
) -> tuple[list[Response], BaseException | None]:
    """Wait for one result and take all others that are there; return the responses and the error,
    if any. The wait is in slices, so that Ctrl-C is noticed.
    """
    batch: list[Response] = []
    while True:
        try:
            result = done.get_nowait() if batch else done.get(timeout=0.2)
        except queue.Empty:
            if batch:
                return batch, None
            continue
        if isinstance(result, BaseException):
            return batch, result
        batch.append(result)
