"""The answer to one request, on its way from the application to the client."""

from __future__ import annotations

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.asgi import App, ClientLeftError, Message, Receive, Send
from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.events import EventTooLongError
from megatron_dcpo.serving.exact_json import compact
from megatron_dcpo.serving.relaying import UpstreamError, headers_of_changed, received, request_of
from megatron_dcpo.serving.replies import NotHiddenError, Score, Scoring, scored_reply
from megatron_dcpo.serving.scorer import Scored
from megatron_dcpo.serving.service import Service
from megatron_dcpo.serving.streams import Stream

# with which a server refuses an option that it does not have
_REFUSALS = (400, 404, 422, 501)
_EVENTS = b"text/event-stream"
_NOT_TEXT = b"\xef\xbb\xbf \t\r\n"  # before the first character of a body


class ServedAnswer:
    """``refused`` is the body of a refusal that nobody has seen yet, because the client's own
    request may not be refused. ``status`` is the one that is counted.
    """

    def __init__(self, service: Service, asked: Asked, score: Score, send: Send) -> None:
        self.service = service
        self.asked = asked
        self.scoring = Scoring(
            asked=asked,
            scorer=service.scorer,
            score=score,
            told=self._told,
            limits=service.limits,
        )
        self.to_client = send
        self.status = 502
        self.start: Message = {}
        self.is_started = False
        self.is_over = False
        self.is_read = False  # the body is changed on its way, or looked at
        self.begun = bytearray()  # what has come before the form is known
        self.whole: bytearray | None = None
        self.stream: Stream | None = None
        self.refused: bytearray | None = None

    @property
    def why_refused(self) -> str:
        """Return the words of a refusal in one line."""
        return one_line((self.refused or b"").decode(errors="replace"), 200)

    @property
    def is_delivered(self) -> bool:
        """Return whether the client has the whole answer, if not the end of its connection."""
        return self.is_over or (self.stream is not None and self.stream.is_complete)

    async def of(self, app: App, scope: Message, receive: Receive) -> None:
        """Let the application answer. Raises :class:`UpstreamError` if nothing was sent by then,
        and :class:`ClientLeftError` if the client has not got the whole answer.
        """
        request, body = request_of(scope, compact(self.asked.sent))
        try:
            async with self.service.ending.watched():
                await app(request, received(body["body"], receive), self._send)
            if not self.is_over and self.refused is None:
                raise UpstreamError("the server ended in the middle of its answer")
        except ClientLeftError:
            if not self.is_delivered:
                raise
        except UpstreamError as error:
            await self._broken(error)
        except Exception as error:
            # an application may wrap what has been raised in it for an answer that is over
            if self.is_over:
                return
            if self.is_started:
                words = f"the server failed in the middle of its answer ({type(error).__name__})"
                await self._broken(UpstreamError(words))
            raise

    async def _broken(self, error: UpstreamError) -> None:
        """Say that the upstream has ended before its answer did."""
        if self.is_over:
            return
        if not self.is_started:
            raise error
        if not self.is_delivered:
            self.status = error.status
        self.is_over = True
        if self.stream is not None:
            rest = await self.stream.broken(str(error))
            await self._pass(rest, is_last=True)

    async def _send(self, message: Message) -> None:
        if self.is_over:
            return
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body":
            await self._continue(message.get("body", b""), not message.get("more_body", False))
        else:
            await self.to_client(message)

    async def _begin(self, message: Message) -> None:
        self.status = message["status"]
        self.start = message
        if self.status in _REFUSALS and self.asked.adds_logprobs:
            self.refused = bytearray()
            return
        # of an error, nothing is shown that log-probs may hide in
        self.is_read = 200 <= self.status < 300 or self.asked.adds_logprobs
        if self.is_read and _header(message, b"content-encoding") not in (b"", b"identity"):
            raise UpstreamError("the upstream compresses its answer, which it was asked not to do")
        if not self.is_read:
            await self._start(message)

    async def _start(self, message: Message) -> None:
        self.is_started = True
        await self.to_client(message)

    async def _continue(self, piece: bytes, is_last: bool) -> None:
        if self.refused is not None:
            self._keep(self.refused, piece)
            return
        if not self.is_read:
            self.is_over = is_last
            await self._pass(piece, is_last)
            return
        if self.whole is None and self.stream is None:
            piece = await self._choose_form(piece, is_last)
        if self.stream is not None:
            await self._send_events(self.stream, piece, is_last)
        elif self.whole is not None:
            self._keep(self.whole, piece)
            if is_last:
                await self._send_whole(bytes(self.whole))

    async def _choose_form(self, piece: bytes, is_last: bool) -> bytes:
        """Decide by the first character whether an answer is JSON or a stream, whatever its header
        says, and return what has come of it.
        """
        self._keep(self.begun, piece)
        if not piece.lstrip(_NOT_TEXT) and not is_last:
            return b""
        piece = bytes(self.begun)
        begins = piece.lstrip(_NOT_TEXT)[:1]
        kind = _header(self.start, b"content-type").lower()
        is_stream = kind.startswith(_EVENTS) or bool(self.asked.body.get("stream"))
        if self.status != 200 or begins in (b"{", b"[") or not is_stream:
            self.whole = bytearray()
            return piece
        self.stream = Stream(self.scoring)
        headers = headers_of_changed(self.start)
        headers = [one for one in headers if one[0].lower() != b"content-type"]
        if not kind.startswith(_EVENTS):
            kind = _EVENTS
        await self._start({**self.start, "headers": [*headers, (b"content-type", kind)]})
        return piece

    def _keep(self, body: bytearray, piece: bytes) -> None:
        """Add a piece to a body that is read as a whole. Raises :class:`UpstreamError` for one that
        is too long.
        """
        body += piece
        most = self.service.limits.reply_bytes
        if len(body) > most:
            raise UpstreamError(f"the upstream's answer has more than {most} bytes")

    async def _send_whole(self, content: bytes) -> None:
        try:
            if self.status == 200 or b"logprob" in content:
                content = await scored_reply(content, self.scoring)
        except NotHiddenError as error:
            raise UpstreamError(f"HTTP {self.status}: {error}") from None
        headers = headers_of_changed(self.start)
        headers.append((b"content-length", str(len(content)).encode()))
        await self._start({**self.start, "headers": headers})
        self.is_over = True
        await self._pass(content, is_last=True)

    async def _send_events(self, stream: Stream, piece: bytes, is_last: bool) -> None:
        try:
            content = await stream.feed(piece, is_last)
        except EventTooLongError as error:
            raise UpstreamError(f"the upstream sends {error}") from None
        self.is_over = is_last
        if content or is_last:
            await self._pass(content, is_last)

    async def _pass(self, content: bytes, is_last: bool) -> None:
        message = {"type": "http.response.body", "body": content, "more_body": not is_last}
        await self.to_client(message)

    def _told(self, name: str, index: int, scored: Scored) -> None:
        self.service.metrics.choice(scored)
        self.service.feedback.remember(name, index, scored.confidence)


def _header(message: Message, wanted: bytes) -> bytes:
    for name, value in message.get("headers", ()):
        if name.lower() == wanted:
            return bytes(value)
    return b""
