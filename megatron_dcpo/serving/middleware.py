"""The ASGI middleware that puts a confidence into the answers of the application that it wraps: the
forwarder of ``dcpo serve``, or vLLM's own server (``--middleware
megatron_dcpo.serving.middleware.ConfidenceMiddleware``).
"""

from __future__ import annotations

import time
from typing import Any

from megatron_dcpo.errors import one_line
from megatron_dcpo.serving.asgi import (
    App,
    BadRequestError,
    ClientLeftError,
    Message,
    Receive,
    Send,
    UpstreamError,
    request_of,
    send_error,
    whole_body,
)
from megatron_dcpo.serving.asking import PATHS, Asked, ask, read_body
from megatron_dcpo.serving.replies import Score, Scoring, compact, error_body, scored_reply
from megatron_dcpo.serving.scorer import Scored
from megatron_dcpo.serving.service import Service
from megatron_dcpo.serving.streams import Stream

# with which a server refuses an option that it does not have
_REFUSALS = (400, 404, 422, 501)


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
            await self.service.pages(scope, receive, send)
        elif path in PATHS and scope["method"] == "POST":
            await self._answer(scope, receive, send)
        else:
            await self._pass(scope, receive, send)

    async def _pass(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let the application answer as it is. After a broken answer nothing more is sent, so that
        the server closes the connection.
        """
        started = False

        async def noticed(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, noticed)
        except ClientLeftError:
            pass
        except UpstreamError as error:
            if not started:
                await send_error(send, 502, str(error))
        except BadRequestError as error:
            await send_error(send, error.status, str(error))

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request for completions."""
        begun = time.perf_counter()
        status = 499  # the client has left
        try:
            content = await whole_body(receive)
            asked = self._asked(content, scope["path"])
            status = await self._exchange(asked, scope, receive, send)
        except ClientLeftError:
            pass
        except BadRequestError as error:
            status = error.status
            await send_error(send, status, str(error))
        except UpstreamError as error:
            status = 502
            await send_error(send, status, str(error))
        finally:
            seconds = time.perf_counter() - begun
            self.service.metrics.request(scope["path"], status, seconds)

    def _asked(self, content: bytes, path: str) -> Asked:
        service = self.service
        try:
            body = read_body(content)
        except ValueError as error:
            words = f"the body is not a JSON object: {error}"
            raise BadRequestError(words) from None
        asked = ask(body, PATHS[path], service.scorer.calibrator, service.names)
        reason = service.without_logprobs.get((path, str(body.get("model"))))
        if asked.adds_logprobs and reason is not None:
            asked = asked.without_logprobs(reason)
        return asked

    async def _exchange(self, asked: Asked, scope: Message, receive: Receive, send: Send) -> int:
        """Send a request on and its answer back; return the status. A request that is refused only
        because log-probs were asked for is sent again as the client made it.
        """
        answer = _Answer(self.service, asked, self._score(asked, scope), send)
        await answer.of(self.app, scope, receive)
        if answer.refused is None:
            return answer.status
        why = one_line(answer.refused.decode(errors="replace"), 200)
        reason = f"no_logprobs: the upstream refuses log-probs ({why})"
        asked = asked.without_logprobs(reason)
        plain = _Answer(self.service, asked, self._score(asked, scope), send)
        await plain.of(self.app, scope, receive)
        if plain.status == 200:
            model = str(asked.body.get("model"))
            self.service.without_logprobs[scope["path"], model] = reason
        return plain.status

    def _score(self, asked: Asked, scope: Message) -> Score:
        """Return how the choices of a request are scored: by what they hold, or by an adapter,
        which the application is asked for.
        """
        scorer = self.service.scorer
        reader = self.service.reader

        async def score(choice: dict[str, Any], index: int) -> Scored:
            scored = scorer.score(asked, choice)
            if reader is None:
                return scored
            return await reader.score(asked, choice, index, scored, self.app, scope)

        return score


class _Answer:
    """The answer to one request, on its way from the application to the client.

    ``refused`` is the body of a refusal that nobody has seen yet, because the client's own request
    may not be refused.
    """

    def __init__(self, service: Service, asked: Asked, score: Score, send: Send) -> None:
        self.service = service
        self.asked = asked
        self.scoring = Scoring(asked=asked, scorer=service.scorer, score=score, told=self._told)
        self.to_client = send
        self.status = 502
        self.start: Message = {}
        self.started = False
        self.whole: bytearray | None = None
        self.stream: Stream | None = None
        self.refused: bytes | None = None

    async def of(self, app: App, scope: Message, receive: Receive) -> None:
        """Let the application answer. Raises :class:`UpstreamError` if nothing was sent by then."""
        request, body = request_of(scope, compact(self.asked.sent))
        bodies = [body]

        async def receive_once() -> Message:
            if bodies:
                return bodies.pop()
            return await receive()

        try:
            await app(request, receive_once, self._send)
        except UpstreamError as error:
            await self._broken(error)

    async def _broken(self, error: UpstreamError) -> None:
        """Say that the upstream has ended before its answer did."""
        if not self.started:
            raise error
        self.status = 502
        if self.stream is None:
            return
        rest = self.stream.end() + _error_event(str(error))
        await self.to_client({"type": "http.response.body", "body": rest})

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body":
            await self._continue(message)
        else:
            await self.to_client(message)

    async def _begin(self, message: Message) -> None:
        self.status = message["status"]
        self.start = message
        if self.status in _REFUSALS and self.asked.adds_logprobs:
            self.refused = b""
            return
        kind = _header(message, b"content-type")
        plain = not _header(message, b"content-encoding")
        if self.status == 200 and plain and kind.startswith(b"text/event-stream"):
            self.stream = Stream(self.scoring)
            await self._start(message)
        elif self.status == 200 and plain and kind.startswith(b"application/json"):
            self.whole = bytearray()
        else:
            await self._start(message)

    async def _start(self, message: Message) -> None:
        self.started = True
        await self.to_client(message)

    async def _continue(self, message: Message) -> None:
        piece = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self.refused is not None:
            self.refused += piece
        elif self.whole is not None:
            self.whole += piece
            if is_last:
                await self._send_whole(bytes(self.whole))
        elif self.stream is not None:
            await self._send_events(self.stream, piece, is_last)
        else:
            await self.to_client(message)

    async def _send_whole(self, content: bytes) -> None:
        content = await scored_reply(content, self.scoring)
        headers = []
        for name, value in self.start.get("headers", ()):
            if name.lower() != b"content-length":
                headers.append((name, value))
        headers.append((b"content-length", str(len(content)).encode()))
        await self._start({**self.start, "headers": headers})
        await self.to_client({"type": "http.response.body", "body": content})

    async def _send_events(self, stream: Stream, piece: bytes, is_last: bool) -> None:
        try:
            content = await stream.feed(piece)
        except ValueError as error:
            raise UpstreamError(f"the upstream sends {error}") from None
        if is_last:
            content += stream.end()
        if content or is_last:
            await self.to_client(
                {"type": "http.response.body", "body": content, "more_body": not is_last}
            )

    def _told(self, name: str, index: int, scored: Scored) -> None:
        self.service.metrics.choice(scored)
        self.service.feedback.remember(name, index, scored.confidence)


def _error_event(words: str) -> bytes:
    return b"data: " + compact(error_body(502, words)) + b"\n\n"


def _header(message: Message, wanted: bytes) -> bytes:
    for name, value in message.get("headers", ()):
        if name.lower() == wanted:
            return bytes(value)
    return b""
