"""The servers of NeMo Gym in one process: an agent asks the others by their names, as over HTTP,
but nothing listens on a port.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.cookies import Morsel, SimpleCookie
from typing import Any
from urllib.parse import urlencode

_TAKEN = ("json", "cookies", "headers", "params")  # what may be said with a request


class Servers:
    """The client of NeMo Gym's servers (its ``ServerClient``): the ``apps`` by their names, and a
    judge model at an address, "" for none, for any other name.
    """

    def __init__(self, judge: str = "") -> None:
        self.apps: dict[str, Any] = {}  # ASGI's
        self.judge = judge.rstrip("/").removesuffix("/v1")

    async def post(self, server_name: str, url_path: str, **options: Any) -> Reply:  # noqa: ANN401
        return await self._request("POST", server_name, url_path, options)

    async def get(self, server_name: str, url_path: str, **options: Any) -> Reply:  # noqa: ANN401
        return await self._request("GET", server_name, url_path, options)

    async def _request(
        self, method: str, server_name: str, url_path: str, options: Mapping[str, Any]
    ) -> Reply:
        unknown = [name for name in options if name not in _TAKEN]
        if unknown:
            raise ValueError(f"a request to {server_name} says {unknown[0]!r}, which is not known")
        app = self.apps.get(server_name)
        if app is not None:
            return await _ask(app, method, url_path, options)
        if not self.judge:
            raise ValueError(f"no server {server_name} runs here, and no judge is named (judge=)")
        return await self._ask_judge(method, url_path, options)

    async def _ask_judge(self, method: str, url_path: str, options: Mapping[str, Any]) -> Reply:
        import aiohttp

        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, self.judge + url_path, data=_body(options), headers=_JSON
            ) as reply,
        ):
            if reply.status >= 400:  # so that it is no verdict
                raise ValueError(f"the judge replied with status {reply.status}")
            return Reply(reply.status, await reply.read(), {})


_JSON = {"content-type": "application/json"}


class Reply:
    """The reply of a server, with what is read of aiohttp's."""

    def __init__(self, status: int, body: bytes, cookies: dict[str, str]) -> None:
        self.status = status
        self.ok = status < 400
        self.cookies = cookies
        self.content = self  # whose ``read`` is the same
        self._body = body

    async def read(self) -> bytes:
        return self._body

    async def json(self) -> Any:  # noqa: ANN401 - JSON of any shape
        return json.loads(self._body)

    def raise_for_status(self) -> None:
        if not self.ok:
            text = " ".join(self._body.decode(errors="replace").split())[:200]
            raise ValueError(f"a server replied with status {self.status}: {text}")


def _body(options: Mapping[str, Any]) -> bytes:
    value = options.get("json")
    if value is None:
        return b""
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json", exclude_unset=True)
    return json.dumps(value).encode()


async def _ask(app: Any, method: str, url_path: str, options: Mapping[str, Any]) -> Reply:  # noqa: ANN401
    """Return what an ASGI application replies. Raises what it raises."""
    body = _body(options)
    headers = {"host": "localhost", **_JSON, "content-length": str(len(body))}
    headers |= {name.lower(): str(value) for name, value in (options.get("headers") or {}).items()}
    cookies = _texts(options.get("cookies") or {})
    if cookies:
        headers["cookie"] = "; ".join(f"{name}={value}" for name, value in cookies.items())
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": url_path,
        "raw_path": url_path.encode(),
        "query_string": urlencode(options.get("params") or {}).encode(),
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
        "state": {},
    }
    is_asked = False
    status = 500
    pieces: list[bytes] = []
    said: SimpleCookie = SimpleCookie()

    async def receive() -> dict[str, Any]:
        nonlocal is_asked
        if is_asked:
            return {"type": "http.disconnect"}
        is_asked = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            for name, value in message["headers"]:
                if name.lower() == b"set-cookie":
                    said.load(value.decode("latin-1"))
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    return Reply(status, b"".join(pieces), {**cookies, **_texts(said)})


def _texts(cookies: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value.value if isinstance(value, Morsel) else str(value)
        for name, value in cookies.items()
    }
