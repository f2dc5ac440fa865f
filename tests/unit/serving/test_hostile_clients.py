"""Who asks, for what, how slowly and how much: each request that may not be passed on is answered
with a status, and the others do not notice it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from megatron_dcpo.errors import UserError
from megatron_dcpo.serving.access import guarded as guarded_app
from megatron_dcpo.serving.access import read_keys
from megatron_dcpo.serving.bounds import Bounds
from megatron_dcpo.serving.middleware import Service, service_of
from megatron_dcpo.serving.proxy import PASSED_ON, proxy_app
from megatron_dcpo.serving.server import Timeouts, server_of
from megatron_dcpo.serving.upstream import Upstream as Forward
from tests.helpers.serving import CHAT, logistic, scorer_with
from tests.helpers.upstream import Served, Upstream, chunks_of, events_of

PATHS = ("/v1/models", "/v1/chat/completions", "/v1/completions", "/health", "/", "/metrics")


@dataclass
class Guarded:
    """The server as the command starts it."""

    port: int
    upstream: Upstream
    service: Service
    server: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def post(self, body: Any = CHAT, **options: Any) -> httpx2.Response:
        return httpx2.post(f"{self.url}/chat/completions", json=body, timeout=30, **options)

    def raw(self, request: bytes) -> bytes:
        """What is answered to these bytes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as client:
            client.sendall(request)
            found = b""
            with suppress(ConnectionError):
                while piece := client.recv(65536):
                    found += piece
            return found


@contextmanager
def guarded(
    keys: tuple[bytes, ...] = (),
    timeouts: Timeouts | None = None,
    grace: int = 5,
    **bounds: Any,
) -> Iterator[Guarded]:
    upstream = Upstream()
    with Served(upstream.app) as behind:
        registry = CollectorRegistry()
        service = service_of(scorer_with(logistic()), registry, bounds=Bounds(**bounds))
        app = proxy_app(behind.url, service, registry, "upstream-key" if keys else None)
        server = server_of(guarded_app(app, keys=keys), grace, timeouts)
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield Guarded(listening.getsockname()[1], upstream, service, server)
        finally:
            server.should_exit = True
            thread.join(20)


def status(answer: bytes) -> int:
    return int(answer.split()[1])


# ------------------------------------------------------------------------------------------ targets

TARGETS = (
    *(b"http://127.0.0.1:1/x", b"@127.0.0.1:1/x", b":1@127.0.0.1:1/x", b".evil.example/x", b"x"),
    *(b"//evil.example/x", b"/v1//evil.example", b"/v1/../../x", b"/v1/%2e%2e/%2e%2e/x"),
    *(b"/v1/..%2f..%2fx", b"/v1/%252e%252e/x", b"/v1/.%2e/x", b"/v1/..;/x", b"/v1/\\x", b"\\x"),
    *(b"/v1/%5c..%5cx", b"/%0d%0aX-Inj:1", b"/%00", b"/a#b", b"/v1/./x", b"/v1/%2f%2fx", b"?x=1"),
    *(b"/v1@127.0.0.1:1/x", b"*", b"/v1/x/..", b"/%25252525252e%25252525252e/"),
    *(b"/v1/models/..", b"/v1/models/", b"/v1/embeddings", b"/v1/models%2fx", b"/v2/models"),
)


def test_a_target_that_is_no_path_of_the_list_is_not_passed_on() -> None:
    with guarded() as one:
        for target in TARGETS:
            head = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            assert status(one.raw(b"GET " + target + head)) in (400, 404), target
        assert status(one.raw(b"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: localhost\r\n\r\n")) >= 400
        assert one.post().status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", *PASSED_ON])
def test_a_path_of_the_list_goes_below_the_upstream(path: str) -> None:
    forward = Forward("http://user:pw@127.0.0.1:9/deep/v1", most=1, seconds=1.0)
    url = forward.address(path, b"x=%0d&y=/../")
    assert (url.host, url.port) == ("127.0.0.1", 9)
    assert url.raw_path == b"/deep" + path.encode() + b"?x=%0d&y=/../"
    assert "pw" not in forward.named


# ------------------------------------------------------------------------------------- who may ask


def test_only_this_machine_and_its_own_pages_may_ask() -> None:
    with guarded() as one:
        root = f"http://127.0.0.1:{one.port}"
        for path in (*PATHS, "/other"):
            for host in ("evil.example", "localhost.evil.example", f"127.0.0.1@x:{one.port}"):
                assert httpx2.post(root + path, headers={"Host": host}).status_code == 400
            for origin in ("http://evil.example", "null", "http://localhost:1", "https://[x"):
                assert httpx2.post(root + path, headers={"Origin": origin}).status_code == 403
        assert one.upstream.asked == []
        for host in ("localhost", "LOCALHOST:80", f"127.0.0.1:{one.port}", "[::1]:8100"):
            assert httpx2.get(f"{root}/v1/models", headers={"Host": host}).status_code == 200
        assert httpx2.get(f"{root}/v1/models", headers={"Origin": root}).status_code == 200
        assert status(one.raw(b"GET /v1/models HTTP/1.1\r\n\r\n")) == 400


def test_a_key_is_required_of_everybody_and_stays_here() -> None:
    with guarded(keys=(b"first-key", b"second-key")) as one:
        for value in ("", "Bearer", "Bearer first-ke", "Basic first-key", "first-key"):
            reply = one.post(headers={"Authorization": value})
            assert reply.status_code == 401
            assert "first-key" not in reply.text
        for path in PATHS:
            assert httpx2.get(f"http://127.0.0.1:{one.port}{path}").status_code == 401
        assert one.upstream.asked == []
        for key in ("first-key", "second-key"):
            assert one.post(headers={"Authorization": f"Bearer {key}"}).status_code == 200
            assert one.upstream.headers[-1]["authorization"] == "Bearer upstream-key"


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"short", b"two words in it", b"k\xc3\xa9y-of-old"]
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(UserError):
        read_keys(str(tmp_path / "keys"))
    with pytest.raises(UserError):
        read_keys(str(tmp_path / "none"))


# ------------------------------------------------------------------------------------------- limits


def test_requests_that_do_not_come_to_an_end_are_dropped() -> None:
    """300 of them: half without an end of their head, half without the rest of their body."""
    heads = (b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX: ",)
    bodies = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",)
    timeouts = Timeouts(head=0.5)
    with guarded(timeouts=timeouts, body_seconds=0.5) as one:
        clients = []
        for begun in (heads + bodies) * 150:
            client = socket.create_connection(("127.0.0.1", one.port))
            client.sendall(begun)
            clients.append(client)
        assert one.post().status_code == 200
        for client in clients:
            client.settimeout(20)
            with suppress(ConnectionError):
                while client.recv(1000):
                    pass
            client.close()
        assert one.post().status_code == 200


def test_a_body_is_refused_while_it_comes() -> None:
    with guarded(request_bytes=100_000) as one:
        for path in ("/v1/chat/completions", "/v1/completions"):
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            sent = b"186a0\r\n" + b"x" * 100_000 + b"\r\n"
            answer = one.raw(head.encode() + sent + sent)
            assert status(answer or b"HTTP/1.1 413") == 413
        assert one.upstream.asked == []


def test_a_compressed_body_is_refused_by_its_header() -> None:
    with guarded() as one:
        for coding in ("gzip", "zstd", "GZIP"):
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: {coding}"
            answer = one.raw(f"{head}\r\nContent-Length: 3\r\n\r\nabc".encode())
            assert status(answer) == 415
            assert coding in answer.decode()
        assert one.upstream.asked == []


def test_more_requests_than_are_taken_are_told_to_come_later() -> None:
    with guarded(concurrent=2) as one:
        one.upstream.pause = 1.0
        statuses = []

        def ask() -> None:
            reply = one.post()
            statuses.append((reply.status_code, reply.headers.get("retry-after")))

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [code for code, _ in statuses].count(200) == 2
        assert statuses.count((429, "2")) == 3
        one.upstream.pause = 0.0
        assert one.post().status_code == 200


def test_bodies_that_are_too_large_together_are_told_to_come_later() -> None:
    with guarded(held_bytes=100) as one:
        assert one.post().status_code == 429


def test_an_answer_that_is_too_long_is_a_bad_gateway() -> None:
    with guarded(reply_bytes=10_000) as one:
        one.upstream.says = lambda body, index: "x" * 20_000
        assert one.post().status_code == 502
    with guarded(reply_bytes=10_000) as one:
        one.upstream.tokens = lambda text: ["a", "x" * 20_000, "b"]
        events = events_of(one.post({**CHAT, "stream": True}).content)
        assert events[-2]["error"]["code"] == 502
        assert events[-1] == b"data: [DONE]"
        last = chunks_of(events)[-1]["choices"][0]
        assert last["confidence"] is None


# --------------------------------------------------------------------------------------------- ends


def test_streams_go_on_for_a_while_when_the_server_ends() -> None:
    with guarded(grace=1) as one:
        one.upstream.pause = 0.2
        one.upstream.tokens = lambda text: list(text)
        body = {**CHAT, "stream": True}
        with httpx2.stream("POST", f"{one.url}/chat/completions", json=body, timeout=30) as reply:
            pieces = reply.iter_bytes()
            content = next(pieces)
            one.server.should_exit = True
            content += b"".join(pieces)
        events = events_of(content)
        assert events[-1] == b"data: [DONE]"
        assert events[-2]["error"]["code"] == 502
        assert len(chunks_of(events)) > 3
        assert chunks_of(events)[-1]["choices"][0]["confidence"] is None
        with pytest.raises(httpx2.ConnectError):
            one.post()


def test_a_client_that_leaves_after_the_last_word_has_its_answer() -> None:
    with guarded() as one:
        body = {**CHAT, "stream": True}
        with httpx2.stream("POST", f"{one.url}/chat/completions", json=body) as reply:
            for piece in reply.iter_bytes():
                if b"[DONE]" in piece:
                    break
        page = httpx2.get(f"http://127.0.0.1:{one.port}/metrics").text
        assert 'status="200"} 1.0' in page
        assert "499" not in page.partition("# TYPE dcpo_requests_created")[0].rpartition("499:")[2]


def test_an_answer_that_has_not_begun_is_unavailable_when_the_server_ends() -> None:
    with guarded(grace=1) as one:
        one.upstream.pause = 20.0
        ending = threading.Timer(0.5, lambda: setattr(one.server, "should_exit", True))
        ending.start()
        reply = one.post()
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "2"
