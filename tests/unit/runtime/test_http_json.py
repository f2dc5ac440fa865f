"""The HTTP client that all servers are asked through: where a key goes, how much is read, what is repeated."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_dcpo.runtime.http_json import HttpError, JsonClient


class Server(ThreadingHTTPServer):
    """Answers with ``replies`` in turn (the last one again and again); keeps the Authorization headers it got."""

    def __init__(self, *replies: tuple[int, bytes, dict[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True
        self.replies, self.keys = list(replies), []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        status, body, headers = self.server.replies[0] if len(self.server.replies) == 1 else self.server.replies.pop(0)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


def serve(servers: list[Server], *replies: tuple[int, bytes, dict[str, str]]) -> Server:
    servers.append(Server(*replies))
    return servers[-1]


def test_a_key_follows_no_redirect_and_is_in_no_repr(servers: list[Server]) -> None:
    other = serve(servers, (200, b'{"ok": 1}', {}))
    first = serve(servers, (302, b"", {"Location": f"{other.url}/elsewhere"}))
    client = JsonClient(first.url, "secret")
    assert client.call("/x") == {"ok": 1}
    assert (first.keys, other.keys) == (["Bearer secret"], [None])
    assert "secret" not in repr(client)


def test_replies_are_bounded(servers: list[Server]) -> None:
    big = serve(servers, (200, json.dumps("x" * 5000).encode(), {}))
    assert JsonClient(big.url).call("/") == "x" * 5000
    with pytest.raises(HttpError, match="a reply of more than"):
        JsonClient(big.url, max_reply_bytes=5000).call("/")


def test_what_may_pass_is_repeated_and_a_refusal_is_not(servers: list[Server]) -> None:
    busy = serve(servers, (429, b"", {"Retry-After": "0"}), (503, b"", {}), (200, b"{", {}), (200, b'{"n": 1}', {}))
    client = JsonClient(busy.url, attempts=5, first_pause=0.01)
    assert client.call("/", {"a": 1}) == {"n": 1}
    assert len(busy.keys) == 4
    with pytest.raises(HttpError, match="not yet"):
        client.call("/", problem=lambda reply: "not yet")
    assert len(busy.keys) == 9
    refused = serve(servers, (401, b"no such\n key", {}))
    with pytest.raises(HttpError, match="HTTP 401 no such key") as caught:
        JsonClient(refused.url, attempts=5).call("/")
    assert (caught.value.status, len(refused.keys)) == (401, 1)


def test_a_stop_ends_the_pauses(servers: list[Server]) -> None:
    down = serve(servers, (503, b"", {}))
    stop = threading.Event()
    stop.set()
    with pytest.raises(HttpError, match="HTTP 503") as caught:
        JsonClient(down.url, attempts=9, first_pause=60).call("/", stop=stop)
    assert (caught.value.status, len(down.keys)) == (None, 1)
