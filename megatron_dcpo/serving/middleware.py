"""The ASGI middleware that puts a confidence into the answers of the application that it wraps: the
forwarder of ``dcpo serve``, or vLLM's own server (``--middleware
megatron_dcpo.serving.middleware.ConfidenceMiddleware``).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from megatron_dcpo.runtime.asgi import (
    App,
    BadRequestError,
    ClientLeftError,
    Message,
    Receive,
    Send,
    whole_body,
)
from megatron_dcpo.serving.answering import ServedAnswer
from megatron_dcpo.serving.asking import PATHS, Asked, ask, read_body
from megatron_dcpo.serving.limits import TooManyError
from megatron_dcpo.serving.relaying import UpstreamError, received, send_error
from megatron_dcpo.serving.replies import Score
from megatron_dcpo.serving.scorer import Scored
from megatron_dcpo.serving.service import Service

_MANY_ROWS = 5000  # tokens from which on a choice is scored in another thread
_LEFT = 499  # the client has gone


class ConfidenceMiddleware:
    """Asks ``app`` for what confidences are computed from and puts them into its answers. Requests
    for other paths reach it unchanged, but for those that ``service`` answers itself.
    """

    def __init__(self, app: App, service: Service | None = None) -> None:
        if service is None:
            from megatron_dcpo.serving.options import service_from_environment

            service = service_from_environment()
        self.app = app
        self.service = service

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        if path in self.service.paths:
            await self._own_page(scope, receive, send)
        elif path in PATHS and scope["method"] == "POST":
            await self._answer(scope, receive, send)
        else:
            await self._pass(scope, receive, send)

    async def _own_page(self, scope: Message, receive: Receive, send: Send) -> None:
        limits = self.service.limits
        try:
            content = await whole_body(receive, limits.feedback_bytes, limits.body_seconds)
            await self.service.pages(scope, received(content, receive), send)
        except ClientLeftError:
            pass
        except BadRequestError as error:
            await send_error(send, error.status, str(error))

    async def _pass(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let the application answer as it is. After a broken answer nothing more is sent, so that
        the server closes the connection.
        """
        started = False

        async def noticed(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        service = self.service
        limits = service.limits
        try:
            async with service.gate.admitted(receive) as body:
                if service.is_proxy:
                    # a place is for a request whose body has come: slow ones take none
                    content = await whole_body(body, limits.request_bytes, limits.body_seconds)
                    body = received(content, receive)
                async with service.gate.passed(), service.ending.watched():
                    await self.app(scope, body, noticed)
        except ClientLeftError:
            pass
        except (BadRequestError, TooManyError, UpstreamError) as error:
            if not started:
                await send_error(send, _status_of(error), str(error))

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request for completions."""
        begun = time.perf_counter()
        service = self.service
        limits = service.limits
        status = _LEFT
        try:
            async with service.gate.admitted(receive) as body:
                content = await whole_body(body, limits.request_bytes, limits.body_seconds)
                asked = self._asked(content, scope["path"])
                async with service.gate.passed():
                    status = await self._exchange(asked, scope, receive, send)
        except ClientLeftError:
            pass
        except (BadRequestError, TooManyError, UpstreamError) as error:
            status = _status_of(error)
            await send_error(send, status, str(error))
        finally:
            seconds = time.perf_counter() - begun
            service.metrics.request(scope["path"], status, seconds)

    def _asked(self, content: bytes, path: str) -> Asked:
        service = self.service
        try:
            body = read_body(content)
        except ValueError as error:
            words = f"the body is not a JSON object: {error}"
            raise BadRequestError(words) from None
        asked = ask(body, PATHS[path], service.scorer.calibrator, service.names)
        reason = service.refusals.reason(asked) if asked.adds_logprobs else ""
        return asked.without_logprobs(reason) if reason else asked

    async def _exchange(self, asked: Asked, scope: Message, receive: Receive, send: Send) -> int:
        """Send a request on and its answer back; return the status. A request that is refused only
        because log-probs were asked for is sent again as the client made it.
        """
        answer = ServedAnswer(self.service, asked, self._score(asked), send)
        await answer.of(self.app, scope, receive)
        if answer.refused is None:
            return answer.status
        reason = f"no_logprobs: the upstream refuses log-probs ({answer.why_refused})"
        plain_asked = asked.without_logprobs(reason)
        plain = ServedAnswer(self.service, plain_asked, self._score(plain_asked), send)
        await plain.of(self.app, scope, receive)
        if plain.status == 200:
            self.service.refusals.remember(asked, reason)
        return plain.status

    def _score(self, asked: Asked) -> Score:
        """Return how the choices of a request are scored."""
        scorer = self.service.scorer

        async def score(choice: dict[str, Any], unreadable: str) -> Scored:
            if unreadable:
                return scorer.unread(asked, choice, unreadable)
            if _row_count(choice) > _MANY_ROWS:
                return await asyncio.to_thread(scorer.score, asked, choice)
            return scorer.score(asked, choice)

        return score


def _row_count(choice: dict[str, Any]) -> int:
    """Return how many tokens of a choice have log-probs."""
    logged = choice.get("logprobs")
    if not isinstance(logged, dict):
        return 0
    rows = logged.get("content") or logged.get("token_logprobs")
    return len(rows) if isinstance(rows, list) else 0


def _status_of(error: Exception) -> int:
    """Return the status with which an error is answered."""
    if isinstance(error, BadRequestError | UpstreamError):
        return error.status
    return 429
