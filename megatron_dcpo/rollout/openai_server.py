"""While an engine serves, it is an OpenAI endpoint on the loopback interface.

One thread with an HTTP server. A session has a key, which is the path (``/s/KEY/v1``), the bearer
token, or both. A request goes to the engine as one :class:`EngineCall` for each of its choices;
each engine response joins its session exactly once, when the call or its retry is answered.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import uvicorn

from megatron_dcpo.rollout.arrivals import Arrivals, EngineCall
from megatron_dcpo.rollout.chat_messages import MessageError
from megatron_dcpo.rollout.chat_tokens import ChatTokens
from megatron_dcpo.rollout.openai_replies import error_body, events, reply_body
from megatron_dcpo.rollout.openai_requests import OpenAIRequest, read_request, stop_seeker
from megatron_dcpo.rollout.sessions import CallRefused, PlannedCall, Session, Turn
from megatron_dcpo.runtime.asgi import (
    BadRequestError,
    ClientLeftError,
    Message,
    Receive,
    Send,
    until_client_leaves,
    whole_body,
)
from megatron_dcpo.runtime.local_names import is_local_host, is_same_origin
from megatron_dcpo.runtime.text import parse_json
from megatron_dcpo.types import Response

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
BODY_BYTES = 16 << 20
BODY_SECONDS = 60.0
_KEPT_KEYS = 1 << 16  # of sessions that are over
_START_SECONDS = 30.0
_RETRY_SECONDS = b"1"
_BAD_BODIES = {408: "too_slow", 413: "too_large"}  # codes by status


class CallGivenUp(Exception):
    """A call gets no answer: its session is over, or its engine failed."""


@dataclass(eq=False)
class _PendingCall:
    """A call whose answer the engine owes, with the requests that repeat it: ``turns`` once it is
    committed. Its client may have left before its answer.
    """

    request: OpenAIRequest
    planned: PlannedCall
    responses: asyncio.Future[list[Response]]
    turns: list[Turn] = field(default_factory=list)
    client_left: bool = False


@dataclass(eq=False)
class _OpenSession:
    """A session that takes calls. ``calls`` are by the digest of their request: equal ones in their
    order.
    """

    session: Session
    calls: dict[bytes, list[_PendingCall]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # of calls that the engine has


class PolicyEndpoint:
    """The policy as agents see it, until :meth:`close`. ``chat`` encodes requests, ``model`` is the
    policy's name.

    The story of a call: :func:`read_request` reads it (:class:`AskedCall`), :meth:`Session.plan`
    finds its place in its session (:class:`PlannedCall`), and the endpoint keeps it
    (:class:`_PendingCall`) while the engine samples its choices (:class:`EngineCall`). With their
    responses :meth:`Session.commit` makes each choice a :class:`Turn` of the session, and the turns
    are the answer.
    """

    def __init__(self, chat: ChatTokens, model: str) -> None:
        self.chat = chat
        self.model = model
        self.arrivals: Arrivals | None = None  # None: the engine does not serve
        self._sessions: dict[str, _OpenSession] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        # sessions are changed by the server's thread and by the engine's
        self._lock = threading.Lock()
        self._waiting: dict[str, asyncio.Future[Response]] = {}
        self._loop = asyncio.new_event_loop()
        self._socket = socket.create_server((HOST, 0), backlog=2048)
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
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

    # ---------------------------------------------------------------------- for the engine's thread
    def open(self, session: Session) -> str:
        """Let a session in; return its key."""
        key = secrets.token_urlsafe(24)
        with self._lock:
            self._sessions[key] = _OpenSession(session)
        return key

    def seal(self, key: str) -> None:
        """End a session: later calls are refused, those under way are given up."""
        with self._lock:
            opened = self._sessions.pop(key)
            opened.session.is_sealed = True
            names = tuple(opened.names)
            self._over[key] = None
            if len(self._over) > _KEPT_KEYS:
                self._over.popitem(last=False)
        if self.arrivals is not None:
            for name in names:
                self.arrivals.cancel((name, opened.session.index))
        if names:
            self._loop.call_soon_threadsafe(self._give_up, names)

    def deliver(self, responses: Iterable[Response]) -> None:
        """Hand over what the engine says to calls from here."""
        known = [one for one in responses if one.prompt_id in self._waiting]
        if known:
            self._loop.call_soon_threadsafe(self._delivered, known)

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        self._thread.join(5.0)
        self._socket.close()

    # ------------------------------------------------------------------------------- in the thread
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

    def _give_up(self, names: Sequence[str]) -> None:
        for name in names:
            future = self._waiting.pop(name, None)
            if future is not None and not future.done():
                future.set_exception(CallGivenUp())
                future.exception()  # nobody may be waiting any more

    async def _app(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._answer(scope, receive, send)
        except CallRefused as refused:
            await _send_error(send, refused)
        except CallGivenUp:
            await _send_error(send, CallRefused(409, "session_is_over", "this session is over"))
        except ClientLeftError:
            pass
        except BadRequestError as bad:
            await _send_error(send, CallRefused(bad.status, _BAD_BODIES[bad.status], str(bad)))
        except Exception as error:
            logger.exception("the policy endpoint failed to answer a request")
            # not a 5xx: clients would ask the same again
            words = f"the endpoint failed: {type(error).__name__}"
            await _send_error(send, CallRefused(400, "endpoint_failed", words))

    async def _answer(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = _headers_of(scope)
        key, path = _key_and_path(scope, headers)
        opened = self._open_session(key)
        if path == "/v1/models" and scope["method"] == "GET":
            entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "megatron-dcpo"}
            await _send_json(send, {"object": "list", "data": [entry]})
            return
        if path not in ("/v1/chat/completions", "/v1/completions"):
            raise CallRefused(404, "not_found", f"there is no {path:.100}")
        if scope["method"] != "POST":
            raise CallRefused(405, "method_not_allowed", f"{path} takes POST")
        content = await whole_body(receive, BODY_BYTES, BODY_SECONDS)
        try:
            body = parse_json(content.decode())
            request = read_request(body, is_chat=path == "/v1/chat/completions")
        except (MessageError, ValueError) as error:
            raise CallRefused(400, "invalid_request_error", f"{error}") from None
        call = self._pending(opened, request, content, headers)
        try:
            await _or_client_leaves(call.responses, receive)
        except ClientLeftError:
            call.client_left = True
            raise
        turns = self._committed(opened, call)
        reply = reply_body(turns, request, self.chat, self.model)
        if request.streams:
            await _send(send, b"".join(events(reply, request)), b"text/event-stream")
        else:
            await _send_json(send, reply)

    def _open_session(self, key: str) -> _OpenSession:
        opened = self._sessions.get(key)
        if opened is not None:
            return opened
        if key in self._over:
            raise CallRefused(409, "session_is_over", "this session is over")
        raise CallRefused(401, "invalid_api_key", "no session has this key")

    def _pending(
        self,
        opened: _OpenSession,
        request: OpenAIRequest,
        content: bytes,
        headers: Mapping[str, str],
    ) -> _PendingCall:
        """Return the pending call of a request: a new one, or for a retry the equal pending one
        whose client disconnected.
        """
        name = headers.get("idempotency-key", "")
        retries = name or headers.get("x-stainless-retry-count", "0") not in ("", "0")
        digest = hashlib.blake2b(name.encode() + b"\0" + content, digest_size=16).digest()
        equal = opened.calls.get(digest, [])
        if retries and equal:
            repeated = next((one for one in reversed(equal) if one.client_left), equal[-1])
            repeated.client_left = False
            return repeated
        arrivals = self.arrivals
        if arrivals is None:
            raise CallRefused(503, "weights_change", "the policy gets new weights; ask again")
        with self._lock:
            planned = opened.session.plan(request.asked)
            opened.names.update(planned.names)
        futures = [self._loop.create_future() for _ in planned.names]
        self._waiting.update(zip(planned.names, futures, strict=True))
        call = _PendingCall(request, planned, asyncio.ensure_future(_all(futures)))
        call.responses.add_done_callback(_retrieved)
        opened.calls.setdefault(digest, []).append(call)
        arrivals.put(*(self._engine_call(opened, planned, one) for one in planned.names))
        return call

    def _engine_call(self, opened: _OpenSession, planned: PlannedCall, name: str) -> EngineCall:
        session = opened.session
        prompt = replace(session.prompt, prompt_id=name, token_ids=planned.prompt_ids)
        ends = stop_seeker(planned.asked.stop, self.chat.tokens.__getitem__)
        return EngineCall(prompt, session.index, planned.max_tokens, ends)

    def _committed(self, opened: _OpenSession, call: _PendingCall) -> list[Turn]:
        """Return the answer to a request, which is added to its session once."""
        with self._lock:
            opened.names.difference_update(call.planned.names)
            if not call.turns:
                call.turns = opened.session.commit(call.planned, call.responses.result())
        return call.turns


async def _all(futures: Sequence[asyncio.Future[Response]]) -> list[Response]:
    return [await future for future in futures]


def _retrieved(future: asyncio.Future[list[Response]]) -> None:
    """Take note of an error that nobody waits for."""
    if not future.cancelled():
        future.exception()


async def _or_client_leaves(future: asyncio.Future[list[Response]], receive: Receive) -> None:
    """Wait for an answer. Raises :class:`ClientLeftError`; the engine goes on, for a retry."""
    leaving = asyncio.ensure_future(until_client_leaves(receive))
    try:
        await asyncio.wait((future, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise ClientLeftError
        future.result()
    finally:
        leaving.cancel()


def _headers_of(scope: Message) -> dict[str, str]:
    """Return the headers of a request. Raises :class:`CallRefused` for one that a page of another
    origin may have sent.
    """
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    host = headers.get("host", "")
    origin = headers.get("origin")
    if not is_local_host(host) or (origin is not None and not is_same_origin(origin, host)):
        raise CallRefused(403, "forbidden", f"ask for {HOST} or localhost")
    return headers


def _key_and_path(scope: Message, headers: Mapping[str, str]) -> tuple[str, str]:
    """Return the key of a session, from the path or the bearer token, and the rest of the path."""
    path = scope["path"]
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    if not path.startswith("/s/"):
        return bearer, path
    key, _, rest = path.removeprefix("/s/").partition("/")
    if bearer and bearer != key:
        raise CallRefused(401, "invalid_api_key", "the key is that of another session")
    return key, f"/{rest}"


async def _send_json(send: Send, value: object) -> None:
    await _send(send, json.dumps(value, ensure_ascii=False).encode(), b"application/json")


async def _send_error(send: Send, refused: CallRefused) -> None:
    headers = []
    if refused.status == 503:
        headers.append((b"retry-after", _RETRY_SECONDS))
    body = error_body(refused.status, refused.code, str(refused))
    await _send(send, body, b"application/json", refused.status, headers)


async def _send(
    send: Send,
    body: bytes,
    kind: bytes,
    status: int = 200,
    more: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
