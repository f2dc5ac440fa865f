"""The HTTP client that all servers are asked through: where a key goes, how much is read, what is
repeated.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_dcpo.runtime.http_json import HttpError, JsonClient


class Server(ThreadingHTTPServer):
    """Answers with ``replies`` in turn (the last one again and again); keeps the Authorization
    headers it got.
    """

    def __init__(self, *replies: tuple[int, bytes, dict[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.daemon_threads = True
        self.replies, self.keys = list(replies), []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        status, body, headers = (
            self.server.replies[0] if len(self.server.replies) == 1 else self.server.replies.pop(0)
        )
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


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("body", [None, {"prompt": "?"}])
def test_a_redirect_is_refused_and_gets_neither_key_nor_request(
    servers: list[Server], status: int, body: dict[str, str] | None
) -> None:
    """Also one to another host name of the same machine, by which a key once reached it."""
    other = serve(servers, (200, b'{"ok": 1}', {}))
    there = other.url.replace("127.0.0.1", "localhost") + "/elsewhere?key=secret"
    first = serve(servers, (status, b"", {"Location": there}))
    client = JsonClient(first.url, "secret", attempts=3, first_pause=0.01)
    with pytest.raises(HttpError) as caught:
        client.call("/x", body)
    assert str(caught.value) == (
        f"{first.url}/x redirects to {there.replace('secret', '***')}; redirects are not "
        "followed, name the address itself"
    )
    assert caught.value.status == status
    assert (first.keys, other.keys) == (["Bearer secret"], [])


def test_no_message_shows_the_key(servers: list[Server]) -> None:
    assert "secret" not in repr(JsonClient("http://h", "secret"))
    for key in ("secret\n", "secret\r\nX-Other: 1", "secreté"):
        with pytest.raises(HttpError, match="holds a line break or another character") as caught:
            JsonClient("http://h", key)
        assert "secret" not in str(caught.value)
    for status in (401, 500):
        echo = serve(servers, (status, b"the key secret is \x1b[31munknown", {}))
        with pytest.raises(HttpError, match=r"the key \*\*\* is \\x1b\[31munknown"):
            JsonClient(echo.url, "secret").call("/")


@pytest.mark.parametrize("before", range(460, 505, 5))
def test_no_part_of_a_key_is_left_where_a_text_is_cut(servers: list[Server], before: int) -> None:
    echo = serve(servers, (401, b"w" * before + b"secret-key rest", {}))
    with pytest.raises(HttpError) as caught:
        JsonClient(echo.url, "secret-key").call("/")
    assert "s" not in str(caught.value).removeprefix("HTTP 401 ").replace(" rest", "")


def test_no_log_shows_the_key(servers: list[Server], caplog: pytest.LogCaptureFixture) -> None:
    """Also not that of the library, which at DEBUG writes the headers of replies."""
    caplog.set_level(logging.DEBUG)
    echo = serve(
        servers, (503, b"the key is secret", {"X-Key": "secret"}), (200, b"1", {"X-Key": "secret"})
    )
    assert JsonClient(echo.url, "secret", attempts=2, first_pause=0.01).call("/x", {"a": 1}) == 1
    assert "HTTP 503 the key is ***" in caplog.text
    assert "secret" not in caplog.text


def test_replies_are_bounded(servers: list[Server]) -> None:
    big = serve(servers, (200, json.dumps("x" * 5000).encode(), {}))
    assert JsonClient(big.url).call("/") == "x" * 5000
    with pytest.raises(HttpError, match="a reply of more than"):
        JsonClient(big.url, max_reply_bytes=5000).call("/")
    refused = serve(servers, (400, b"x" * 10**6, {}))
    with pytest.raises(HttpError) as caught:
        JsonClient(refused.url).call("/")
    assert len(str(caught.value)) < 600
    packed = serve(servers, (200, gzip.compress(b"1"), {"Content-Encoding": "gzip"}))
    with pytest.raises(HttpError):  # nothing is decompressed, to any size
        JsonClient(packed.url).call("/")


def test_a_request_that_is_not_read_ends_at_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = JsonClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5)
        with pytest.raises(HttpError, match=r"WriteTimeout|TimeoutError"):
            client.call("/", "x" * (16 << 20))


@pytest.mark.parametrize(
    "text", [b"[" * 10**5, b'{"a":' * 10**5, b"1" * 10**5, b"\xff\xfe\x00", b"{", b"NaN]"]
)
def test_what_is_not_json_is_an_error(servers: list[Server], text: bytes) -> None:
    with pytest.raises(HttpError):
        JsonClient(serve(servers, (200, text, {})).url).call("/")


def test_lone_surrogates_become_harmless(servers: list[Server]) -> None:
    odd = serve(servers, (200, rb'{"text": "a\ud800b", "\udfff": "\ud83d\ude00"}', {}))
    assert JsonClient(odd.url).call("/") == {"text": "a\ufffdb", "\ufffd": "\U0001f600"}


DRIPS = {
    "status line": b"H" * 10**4,
    "headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 10**4,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 10**4,
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n" + b" " * 10**4,
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 10**4,
    "error": b"HTTP/1.1 400 No\r\nContent-Length: 10000\r\n\r\n" + b"x" * 10**4,
}


@pytest.mark.parametrize("what", DRIPS)
def test_a_reply_that_drips_ends_at_the_time_limit(what: str) -> None:
    """A byte every 20 ms would keep a time-out for each read waiting for minutes."""
    ended = threading.Event()
    sent: list[int] = []

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            for at in range(len(DRIPS[what])):
                connection.sendall(DRIPS[what][at : at + 1])
                sent.append(at)
                if ended.wait(0.02):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(HttpError):
            JsonClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=1.0).call("/")
        ended.set()
        thread.join()
    assert len(sent) < 500, "in a second at most 50 bytes come"


def test_what_may_pass_is_repeated_and_a_refusal_is_not(servers: list[Server]) -> None:
    busy = serve(
        servers,
        (429, b"", {"Retry-After": "0"}),
        (503, b"", {}),
        (200, b"{", {}),
        (200, b'{"n": 1}', {}),
    )
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


@pytest.mark.parametrize(
    ("status", "repeated"),
    [
        (500, True),
        (507, True),
        (520, True),
        (524, True),
        (529, True),
        (530, True),
        (400, False),
        (404, False),
        (501, False),
        (505, False),
    ],
)
def test_which_statuses_are_repeated(servers: list[Server], status: int, repeated: bool) -> None:
    """Also those of proxies in front of the server (Cloudflare's 520 to 530)."""
    server = serve(servers, (status, b"", {}), (200, b"1", {}))
    client = JsonClient(server.url, attempts=2, first_pause=0.01)
    if repeated:
        assert client.call("/") == 1
    else:
        with pytest.raises(HttpError) as caught:
            client.call("/")
        assert caught.value.status == status
    assert len(server.keys) == 1 + repeated


def test_nobody_who_listens_is_told_apart(servers: list[Server]) -> None:
    down = serve(servers, (503, b"", {}))
    with pytest.raises(HttpError) as caught:
        JsonClient(down.url).call("/")
    assert not caught.value.unreachable
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(HttpError) as caught:
        JsonClient(f"http://127.0.0.1:{port}").call("/")
    assert caught.value.unreachable


def test_a_stop_ends_the_pauses(servers: list[Server]) -> None:
    down = serve(servers, (503, b"", {}))
    stop = threading.Event()
    client = JsonClient(down.url, attempts=9, first_pause=60)
    stopped_in_a_pause = threading.Timer(0.3, stop.set)
    stopped_in_a_pause.start()
    with pytest.raises(HttpError, match="HTTP 503") as caught:
        client.call("/", stop=stop)
    assert (caught.value.status, len(down.keys)) == (None, 1)


def test_a_stop_withdraws_the_request() -> None:
    """The server sees that its client is gone, as soon as it stops waiting."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()
        client = JsonClient(f"http://127.0.0.1:{listening.getsockname()[1]}")
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                client.call("/", {"prompt": "?"}, stop=stop)
            except HttpError as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(20)
            while b"?" not in connection.recv(1 << 16):
                pass
            assert asking.is_alive()
            stop.set()
            assert connection.recv(1) == b"", "the end of the connection"
        asking.join(20)
    assert not asking.is_alive()
    assert "withdrawn" in str(errors[0])


@pytest.mark.parametrize("of_a_job", [True, False])
def test_a_lost_host_of_the_job_is_noticed_by_the_kernel(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch, of_a_job: bool
) -> None:
    """A request may wait for hours; nothing of its connection is heard meanwhile."""
    asked: dict[Any, Any] = {}
    real = socket.socket.setsockopt

    def note(self: socket.socket, level: int, name: int, *value: Any) -> None:
        asked[level, name] = value[0]
        real(self, level, name, *value)

    there = serve(servers, (200, b"1", {}))
    monkeypatch.setattr(socket.socket, "setsockopt", note)
    assert JsonClient(there.url, through_proxy=not of_a_job).call("/") == 1
    watched = {
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 120_000,
    }
    for option, value in watched.items():
        assert asked.get(option) == (value if of_a_job else None)


class Counting(BaseHTTPRequestHandler):
    """Keeps connections, sets a cookie, and answers with the number of connections so far and the
    cookie that came.
    """

    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        super().setup()
        type(self).connections += 1

    def do_GET(self) -> None:
        text = json.dumps([self.connections, self.headers.get("Cookie")]).encode()
        self.send_response(200)
        self.send_header("Set-Cookie", "name=value")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


def test_requests_share_a_connection_and_no_cookie_and_a_fork_has_its_own() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        replies = [JsonClient(url).call("/") for _ in range(3)]
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
            forked = pool.submit(JsonClient(url).call, "/").result(timeout=20)
        server.shutdown()
    assert replies == [[1, None]] * 3
    assert forked == [2, None]
