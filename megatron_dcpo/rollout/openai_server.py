"""While an engine serves, it is an OpenAI endpoint on the loopback interface.

A session has a key, which is the path (``/s/KEY/v1``), the bearer token, or both.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Mount, Route, Router

from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall, StopTexts
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.openai_replies import error_body, events, reply_body
from megatron_dcpo.rollout.openai_requests import (
    ChatRequest,
    CompletionRequest,
    OpenAIRequest,
    read_request,
)
from megatron_dcpo.rollout.sessions import (
    Call,
    CallRefused,
    PlannedCall,
    Session,
    Turn,
    session_is_over,
)
from megatron_dcpo.runtime.asgi import (
    BadRequestError,
    ClientLeftError,
    Receive,
    until_client_leaves,
    whole_body,
)
from megatron_dcpo.runtime.local_names import is_local_host, is_same_origin
from megatron_dcpo.types import Response

T = TypeVar("T")

HOST = "127.0.0.1"
BODY_BYTES = 16 << 20
BODY_SECONDS = 60.0
_KEPT_KEYS = 1 << 16  # of sessions that are over
_START_SECONDS = 30.0
_SMALL = 1 << 14  # bytes or characters that are read or encoded in milliseconds
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "too_slow",
    413: "too_large",
    415: "compressed",
}


@dataclass(frozen=True)
class _Sampled:
    """A call with what the engine has sampled for its choices."""

    planned: PlannedCall
    responses: list[Response]


@dataclass(eq=False)
class _PendingCall:
    """A call that is being answered, with the requests that repeat it: ``turns`` once it is
    committed. Its client may have left before its answer.
    """

    sampled: asyncio.Task[_Sampled]
    turns: list[Turn] = field(default_factory=list)
    client_left: bool = False

    @property
    def is_refused(self) -> bool:
        done = self.sampled.done() and not self.sampled.cancelled()
        return done and self.sampled.exception() is not None


@dataclass(eq=False)
class _OpenSession:
    """A session that takes calls. ``calls`` are by the digest of their request: equal ones in their
    order.
    """

    session: Session
    calls: dict[bytes, list[_PendingCall]] = field(default_factory=dict)


class PolicyEndpoint:
    """The policy as agents see it, until :meth:`close`: an HTTP server on an event loop in a
    thread, which alone changes sessions. ``chat`` encodes requests, ``model`` is the policy's name.

    What happens to a request, from its arrival to its reply:

    1. Its key names an open session; its body becomes a :class:`Call` (:func:`read_request`), or is
       refused by the name of the field that cannot be honored.
    2. A retry joins the pending call that it repeats. Any other request is a new one: its texts are
       counted, then encoded (in another thread, unless they are short), and it gets its place in
       the session (:meth:`Session.admit`, :meth:`Session.encode`, :meth:`Session.plan`).
    3. The engine samples each of its choices as an :class:`EngineCall`, together with whatever else
       has arrived (:meth:`sample`), and hands them over (:meth:`deliver`).
    4. If a client still waits, the call joins its session, once (:meth:`Session.commit`), and its
       turns are the reply. If the session ends before that, the call ends with it.
    """

    def __init__(self, chat: ChatTokens, model: str) -> None:
        self.chat = chat
        self.model = model
        self.arrivals: Arrivals | None = None  # None: the engine does not serve
        self._sessions: dict[str, _OpenSession] = {}
        self._over: dict[str, None] = {}
        self._waiting: dict[str, asyncio.Future[Response]] = {}  # by the names of the choices
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server((HOST, 0), backlog=2048)
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._application(),
            loop="none",
            lifespan="off",
            ws="none",
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=3600,  # an agent may think for long between two calls
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="policy endpoint", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait(_START_SECONDS)

    # ------------------------------------------------------------------------- for other threads
    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` returns, on the endpoint's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def deliver(self, responses: Sequence[Response]) -> None:
        """Hand over what the engine has sampled."""
        if responses:
            self._loop.call_soon_threadsafe(self._delivered, responses)

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        self._thread.join(5.0)
        self._socket.close()

    # --------------------------------------------------------------------------- on the event loop
    def open(self, session: Session) -> str:
        """Let a session in; return its key."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = _OpenSession(session)
        return key

    def seal(self, key: str) -> None:
        """End a session: later calls are refused, those under way are given up."""
        opened = self._sessions.pop(key)
        opened.session.is_sealed = True
        for call in (one for equal in opened.calls.values() for one in equal):
            call.sampled.cancel()
        self._over[key] = None
        if len(self._over) > _KEPT_KEYS:
            del self._over[next(iter(self._over))]

    async def sample(self, session: Session, *planned: PlannedCall) -> list[Response]:
        """Return what the engine samples for the choices of calls, which it gets at the same time.
        One that is given up is withdrawn.
        """
        arrivals = self._engine()
        calls = [self._engine_call(session, one, name) for one in planned for name in one.names]
        futures = [self._loop.create_future() for _ in calls]
        names = [call.prompt.prompt_id for call in calls]
        self._waiting.update(zip(names, futures, strict=True))
        arrivals.put(*calls)
        try:
            return [await future for future in futures]
        finally:
            for call in calls:
                if self._waiting.pop(call.prompt.prompt_id, None) is not None:
                    arrivals.cancel(call.key)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_later(0.0, self._started.set)
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))

    def _delivered(self, responses: Sequence[Response]) -> None:
        for response in responses:
            future = self._waiting.pop(response.prompt_id, None)
            if future is not None and not future.done():
                future.set_result(response)

    def _engine(self) -> Arrivals:
        if self.arrivals is None:
            raise CallRefused(503, "weights_change", "the policy gets new weights; ask again")
        return self.arrivals

    def _engine_call(self, session: Session, planned: PlannedCall, name: str) -> EngineCall:
        prompt = replace(session.prompt, prompt_id=name, token_ids=planned.prompt.token_ids)
        ends = None
        if planned.call.stop:
            ends = StopTexts(planned.call.stop, self.chat.tokens.__getitem__)
        return EngineCall(prompt, session.index, planned.max_tokens, ends)

    # ---------------------------------------------------------------------------------- the routes
    def _application(self) -> Starlette:
        routes = [
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/chat/completions", self._chat_completions, methods=["POST"]),
            Route("/v1/completions", self._completions, methods=["POST"]),
        ]
        below_key = Mount("/s/{key}", app=Router(routes, redirect_slashes=False))
        application = Starlette(
            routes=[below_key, *routes],
            exception_handlers={
                CallRefused: _refused,
                HTTPException: _no_route,
                Exception: _failed,
            },
        )
        application.router.redirect_slashes = False
        return application

    async def _models(self, request: Request) -> HttpResponse:
        self._open_session(request)
        entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "megatron-dcpo"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _chat_completions(self, request: Request) -> HttpResponse:
        return await self._reply(request, ChatRequest)

    async def _completions(self, request: Request) -> HttpResponse:
        return await self._reply(request, CompletionRequest)

    async def _reply(self, request: Request, kind: type[OpenAIRequest]) -> HttpResponse:
        opened = self._open_session(request)
        try:
            content = await whole_body(request.scope, request.receive, BODY_BYTES, BODY_SECONDS)
            wanted = await _beside(len(content), partial(read_request, content, kind))
            call = self._pending(opened, wanted.call(), content, request.headers)
            turns = await self._answer(opened, call, request.receive)
        except ClientLeftError:
            return HttpResponse()  # which nobody gets
        except BadRequestError as error:
            raise CallRefused(error.status, _CODES[error.status], str(error)) from None
        body = reply_body(turns, wanted, self.chat, self.model)
        if not wanted.stream:
            return JSONResponse(body)
        pieces = events(body, with_usage=bool(wanted.stream_options.get("include_usage")))
        return HttpResponse(b"".join(pieces), headers={"content-type": "text/event-stream"})

    def _open_session(self, request: Request) -> _OpenSession:
        """Return the session of a request, by the key in its path and its bearer token. Raises
        :class:`CallRefused`, also for a request that a page of another origin may have sent.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if not is_local_host(host) or (origin is not None and not is_same_origin(origin, host)):
            raise CallRefused(403, "forbidden", f"ask for {HOST} or localhost")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = request.path_params.get("key", bearer)
        if bearer and key != bearer:
            raise CallRefused(
                401, "invalid_api_key", "the path and the API key are of two sessions"
            )
        if key in self._over:
            raise session_is_over()
        if key not in self._sessions:
            raise CallRefused(401, "invalid_api_key", "no session has this key")
        return self._sessions[key]

    def _pending(
        self, opened: _OpenSession, call: Call, content: bytes, headers: Mapping[str, str]
    ) -> _PendingCall:
        """Return the pending call of a request: a new one, or for a retry the equal pending one
        whose client disconnected.
        """
        name = headers.get("idempotency-key", "")
        is_retry = name or headers.get("x-stainless-retry-count", "0") not in ("", "0")
        digest = hashlib.blake2b(name.encode() + b"\0" + content, digest_size=16).digest()
        pending = opened.calls.setdefault(digest, [])
        equal = [one for one in pending if not one.is_refused]
        if is_retry and equal:
            repeated = next((one for one in reversed(equal) if one.client_left), equal[-1])
            repeated.client_left = False
            return repeated
        new = _PendingCall(self._loop.create_task(self._sampled(opened.session, call)))
        new.sampled.add_done_callback(_take_note)
        pending.append(new)
        return new

    async def _sampled(self, session: Session, call: Call) -> _Sampled:
        self._engine()
        session.admit(call)
        prompt = await _beside(call.characters, partial(session.encode, call))
        planned = session.plan(call, prompt)
        return _Sampled(planned, await self.sample(session, planned))

    async def _answer(
        self, opened: _OpenSession, call: _PendingCall, receive: Receive
    ) -> list[Turn]:
        """Return the turns of a call, which joins its session once. Raises
        :class:`ClientLeftError`; the engine goes on then, for a retry.
        """
        leaving = asyncio.ensure_future(until_client_leaves(receive))
        try:
            await asyncio.wait((call.sampled, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if not call.sampled.done():
            call.client_left = True
            raise ClientLeftError
        if call.sampled.cancelled():
            raise session_is_over()
        sampled = call.sampled.result()
        if not call.turns:
            call.turns = opened.session.commit(sampled.planned, sampled.responses)
        return call.turns


async def _beside(size: int, work: Callable[[], T]) -> T:
    """Return what ``work`` returns, from another thread if its ``size`` may hold others up."""
    if size < _SMALL:
        return work()
    return await asyncio.to_thread(work)


def _take_note(sampled: asyncio.Task[_Sampled]) -> None:
    """Take note of an error that nobody may be waiting for."""
    if not sampled.cancelled():
        sampled.exception()


async def _refused(_: Request, error: Exception) -> HttpResponse:
    """Return an error as OpenAI's clients read it."""
    assert isinstance(error, CallRefused)
    body = error_body(error.status, error.code, str(error), error.field)
    headers = {"retry-after": "1"} if error.status == 503 else None
    return JSONResponse(body, error.status, headers)


async def _no_route(request: Request, error: Exception) -> HttpResponse:
    assert isinstance(error, HTTPException)
    code = _CODES[error.status_code]
    return await _refused(request, CallRefused(error.status_code, code, error.detail))


async def _failed(request: Request, error: Exception) -> HttpResponse:
    # not a 5xx: clients would ask the same again
    words = f"the endpoint failed: {type(error).__name__}"
    return await _refused(request, CallRefused(400, "endpoint_failed", words))
