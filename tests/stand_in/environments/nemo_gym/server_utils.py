"""The stand-in's servers and the client of other servers."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Answer = Callable[[str, dict[str, Any]], Awaitable[Any]]


class ServerClient(BaseModel):
    head_server_config: Any
    global_config_dict: Any


def is_global_aiohttp_client_setup() -> bool:
    return True


def served(answers: dict[str, Answer]) -> Starlette:
    """An application whose paths are answered with the session of a cookie, and the body."""

    def route(path: str, answer: Answer) -> Route:
        async def endpoint(request: Request) -> Response:
            session = request.cookies.get("session") or str(uuid.uuid4())
            found = await answer(session, await request.json())
            if isinstance(found, BaseModel):
                found = found.model_dump(mode="json")
            reply = JSONResponse(found)
            reply.set_cookie("session", session)
            return reply

        return Route(path, endpoint, methods=["POST"])

    return Starlette(routes=[route(path, answer) for path, answer in answers.items()])
