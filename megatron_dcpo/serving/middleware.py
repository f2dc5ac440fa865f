"""The ASGI middleware that puts a confidence into the answers of the application that it wraps: the
forwarder of ``dcpo serve``, or vLLM's own server (``--middleware
megatron_dcpo.serving.middleware.ConfidenceMiddleware``). ``_answer`` is the way of one request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import time
from dataclasses import dataclass, field

from prometheus_client import REGISTRY, CollectorRegistry

from megatron_dcpo.errors import one_line
from megatron_dcpo.runtime.asgi import (
    App,
    BadRequestError,
    ClientLeftError,
    Message,
    Receive,
    Send,
    whole_body,
)
from megatron_dcpo.serving.asking import PATHS, Asked, ask, read_body
from megatron_dcpo.serving.bounds import Bounds, Gate
from megatron_dcpo.serving.branch import Lines, TurnBranch, poster
from megatron_dcpo.serving.calibrator import Names
from megatron_dcpo.serving.counters import Counters
from megatron_dcpo.serving.events import EventTooLongError
from megatron_dcpo.serving.exchange import (
    UpstreamError,
    UpstreamReply,
    exchange,
    send_body,
    send_error,
    send_head,
)
from megatron_dcpo.serving.json_text import compact
from megatron_dcpo.serving.scorer import Scorer
from megatron_dcpo.serving.scoring_options import add_scoring_arguments, scorer_of
from megatron_dcpo.serving.stream import Stream
from megatron_dcpo.serving.whole_reply import NotHiddenError, Scoring, scored_reply, stated_in

ENVIRONMENT = "DCPO_SERVE"
_NO_BOUND = 1 << 60
# with which a server refuses an option that it does not have
_REFUSALS = (400, 404, 422, 501)
_EVENTS = b"text/event-stream"
_LEFT = 499  # the client has gone
_BROKEN = 502
_ENDING = 503
_ENDS = "the server is ending"  # which cancels requests under way


@dataclass(frozen=True)
class Service:
    """How choices are scored, where that is counted, under which names the upstream knows its
    models, and how much is taken.
    """

    scorer: Scorer
    counters: Counters
    names: Names = field(default_factory=dict)
    bounds: Bounds = field(default_factory=Bounds)


def service_of(
    scorer: Scorer,
    registry: CollectorRegistry,
    names: Names | None = None,
    bounds: Bounds | None = None,
) -> Service:
    """Return a service that counts in a registry."""
    fitted = None
    if scorer.calibrator is not None and scorer.calibrator.record is not None:
        fitted = scorer.calibrator.record.counts
    return Service(scorer, Counters(registry, fitted), names or {}, bounds or Bounds())


def service_from_environment() -> Service:
    """Return the service of a middleware inside vLLM, whose metrics stand among the server's.
    Raises :class:`UserError`, or exits with a usage line, for wrong options.
    """
    parser = argparse.ArgumentParser(prog=ENVIRONMENT)
    add_scoring_arguments(parser)
    args = parser.parse_args(shlex.split(os.environ.get(ENVIRONMENT, "")))
    # how many requests it takes at a time is the server's affair
    bounds = Bounds(concurrent=_NO_BOUND, held_bytes=_NO_BOUND)
    return service_of(scorer_of(args), REGISTRY, bounds=bounds)


class ConfidenceMiddleware:
    """Asks ``app`` for what confidences are computed from and puts them into its answers. Requests
    for other paths reach it unchanged.
    """

    def __init__(self, app: App, service: Service | None = None) -> None:
        self.app = app
        self.service = service or service_from_environment()
        self.gate = Gate(self.service.bounds)
        self.lines: Lines = {}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        if not is_http or scope["path"] not in PATHS or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = _LEFT
        try:
            status = await self._answer(scope, receive, send)
        except ClientLeftError:
            pass
        except BadRequestError as error:
            status = error.status
            await send_error(send, status, str(error))
        except UpstreamError as error:
            status = _BROKEN
            await send_error(send, status, str(error))
        except asyncio.CancelledError:
            status = _ENDING
            await send_error(send, status, _ENDS)
        finally:
            self.service.counters.request(scope["path"], status, time.perf_counter() - begun)

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> int:
        """Answer a request, and return the status. One that is refused only because log-probs or
        ids were asked for is sent again as the client made it.
        """
        bounds = self.service.bounds
        async with self.gate.admitted(receive) as body:
            content = await whole_body(scope, body, bounds.request_bytes, bounds.body_seconds)
            asked = self._asked(content, scope["path"])
            async with exchange(self.app, scope, receive, compact(asked.sent)) as reply:
                if reply.status not in _REFUSALS or not asked.adds:
                    return await self._pass(self._scoring(asked, scope, receive), reply, send)
                words = await reply.whole(bounds.reply_bytes)
            asked = asked.as_made(one_line(words.decode(errors="replace"), 200))
            async with exchange(self.app, scope, receive, compact(asked.sent)) as reply:
                return await self._pass(self._scoring(asked, scope, receive), reply, send)

    def _asked(self, content: bytes, path: str) -> Asked:
        try:
            body = read_body(content)
        except ValueError as error:
            raise BadRequestError(f"the body is not a JSON object: {error}") from None
        return ask(body, PATHS[path], self.service.scorer.calibrator, self.service.names)

    def _scoring(self, asked: Asked, scope: Message, receive: Receive) -> Scoring:
        """Return how the answer to a request is scored, which may take further requests."""
        service = self.service
        bounds = service.bounds
        branch = None
        calibrator = service.scorer.calibrator
        if calibrator is not None and calibrator.is_of_turns and not asked.refusal:
            post = poster(self.app, scope, receive, bounds)
            marker = service.scorer.marker
            branch = TurnBranch(post, asked, marker, bounds.body_seconds, self.lines)
        return Scoring(asked, service.scorer, service.counters.choice, bounds, branch)

    async def _pass(self, scoring: Scoring, reply: UpstreamReply, send: Send) -> int:
        """Pass an answer on, whole or as a stream: that is seen from its first character, whatever
        its header says.
        """
        if reply.header(b"content-encoding") not in (b"", b"identity"):
            raise UpstreamError("the upstream compresses its answer, which it was asked not to do")
        most = scoring.bounds.reply_bytes
        first = await reply.first_character(most)
        may_stream = scoring.asked.body.get("stream") or reply.header(b"content-type").startswith(
            _EVENTS
        )
        if reply.status == 200 and may_stream and first not in (b"{", b"["):
            return await self._pass_stream(scoring, reply, send)
        content = await reply.whole(most)
        try:
            if reply.status == 200:
                stated = await stated_in(content, scoring)
                content = await asyncio.to_thread(scored_reply, content, scoring, stated)
            elif b"logprob" in content or b"token_ids" in content:
                content = await asyncio.to_thread(scored_reply, content, scoring)
        except NotHiddenError as error:
            raise UpstreamError(f"HTTP {reply.status}: {error}") from None
        headers = reply.headers_of_changed()
        headers.append((b"content-length", str(len(content)).encode()))
        await send_head(send, reply.status, headers)
        await send_body(send, content)
        return reply.status

    async def _pass_stream(self, scoring: Scoring, reply: UpstreamReply, send: Send) -> int:
        """Pass the events of a stream on. After its head an error can only be said in an event."""
        headers = [one for one in reply.headers_of_changed() if one[0] != b"content-type"]
        kind = reply.header(b"content-type")
        if not kind.startswith(_EVENTS):
            kind = _EVENTS
        await send_head(send, reply.status, [*headers, (b"content-type", kind)])
        stream = Stream(scoring)
        try:
            async for piece in reply.pieces():
                if content := await stream.feed(piece):
                    await send_body(send, content, is_last=False)
            rest = await stream.end()
        except ClientLeftError:
            if not stream.is_complete:
                raise
            return reply.status
        except (EventTooLongError, UpstreamError) as error:
            rest = await stream.broken(str(error))
        except asyncio.CancelledError:
            rest = await stream.broken(_ENDS)
        except Exception as error:
            words = f"the server failed in the middle of its answer ({type(error).__name__})"
            await send_body(send, await stream.broken(words))
            raise
        await send_body(send, rest)
        return _BROKEN if stream.is_broken else reply.status
