"""A verifier behind an address: the example's server, and servers that answer anything else."""

from __future__ import annotations

import json
import logging
import runpy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.errors import UserError
from megatron_dcpo.judging import endpoint
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.endpoint import KEY, EndpointVerifier
from tests.helpers.paths import REPOSITORY


@contextmanager
def serving(handler: Any) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def answering(reply: Callable[[Any], tuple[int, bytes]]) -> type[BaseHTTPRequestHandler]:
    """``reply``: from the parsed body to status and text; an empty batch is answered well."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = reply(body) if body["items"] else (200, b'{"results": []}')
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    return Handler


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    client = endpoint.JsonClient
    monkeypatch.setattr(endpoint, "JsonClient", lambda *a, **k: client(*a, **k, first_pause=0.001))


def verifier_at(url: str) -> EndpointVerifier:
    return EndpointVerifier(url, JudgingConfig(verifier=url, program_seconds=5.0))


def test_the_examples_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key on both sides; another key is refused, and neither is shown."""
    monkeypatch.setenv(KEY, "s3cret")
    handler = runpy.run_path(str(REPOSITORY / "examples" / "reward_server" / "server.py"))[
        "Handler"
    ]
    handler.log_message = lambda *_: None
    with serving(handler) as url:
        outcomes = verifier_at(url)(
            [Attempt(None, "7", text, {"level": 1}) for text in ("3 or 7", "7 or 3", "none")]
        )
        assert [outcome.correct for outcome in outcomes] == [True, False, False]
        assert outcomes[0].logged == {"score": 1.0, "numbers": 2}
        monkeypatch.setenv(KEY, "an0ther")
        with pytest.raises(UserError, match="HTTP 401") as refused:
            verifier_at(url)
        assert "an0ther" not in str(refused.value)


def test_what_is_posted() -> None:
    seen: list[Any] = []

    def reply(body: Any) -> tuple[int, bytes]:
        seen.append(body)
        return 200, json.dumps({"results": [True] * len(body["items"])}).encode()

    row = {"problem": "P", "answer": [1, "one"], "level": 2, "when": {1}}
    with serving(answering(reply)) as url:
        assert all(
            outcome.correct
            for outcome in verifier_at(url)([Attempt("x", "1", "thought", row)] * 100)
        )
    assert [len(body["items"]) for body in seen] == [64, 36]
    assert seen[0]["items"][0] == {
        "response": "thought",
        "answer": [1, "one"],
        "problem": "P",
        "columns": {"level": 2, "when": "{1}"},
    }


def test_a_server_that_fails_for_a_moment_is_asked_again() -> None:
    statuses = iter([503, 429])

    def reply(body: Any) -> tuple[int, bytes]:
        status = next(statuses, 200)
        return status, b'{"results": [1]}' if status == 200 else b"later"

    with serving(answering(reply)) as url:
        assert verifier_at(url)([Attempt(None, "", "", None)])[0].correct


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, b"not JSON"),
        (200, b"[]"),
        (200, b'{"results": []}'),
        (200, b'{"results": [2]}'),
        (200, b'{"results": [NaN]}'),
        (200, b'{"results": [{"error": "no model"}]}'),
        (400, b"bad"),
        (500, b""),
        (302, b""),
        (200, b"x" * (endpoint.MAX_REPLY_BYTES + 1)),
    ],
)
def test_another_reply_is_an_error_of_each_response(
    status: int, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(answering(lambda body: (status, text))) as url, caplog.at_level(logging.WARNING):
        verifier = verifier_at(url)
        outcomes = verifier([Attempt(None, "", "", None)]) + verifier([Attempt(None, "", "", None)])
    assert outcomes == [None, None]
    assert len(caplog.messages) == 1


def test_a_score_with_an_error_that_is_null_is_a_score() -> None:
    text = b'{"results": [{"score": 1, "error": null, "n": 1' + b"0" * 400 + b"}]}"
    with serving(answering(lambda body: (200, text))) as url:
        outcome = verifier_at(url)([Attempt(None, "", "", None)])[0]
    assert (outcome.correct, outcome.category) == (True, None)
    assert outcome.logged == {"score": 1.0, "n": "1" + "0" * 199}


def test_no_result_and_no_error_shows_the_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also none that stands where the text is cut, and none with characters that JSON escapes."""
    key = 'the"secret' + "0123456789" * 20
    monkeypatch.setenv(KEY, key)
    logged = {"score": 1, key: "x" * 150 + key, "list": [key], "deep": {"a": key}}
    replies = iter(
        [{"results": [logged]}, {"results": [{"error": "x" * 280 + key}]}, {"wrong": key}]
    )

    def reply(body: Any) -> tuple[int, bytes]:
        return 200, json.dumps(next(replies, {"wrong": key})).encode()

    with serving(answering(reply)) as url, caplog.at_level(logging.DEBUG):
        outcome = verifier_at(url)([Attempt(None, "", "", None)])[0]
        for _ in range(2):
            verifier_at(url)([Attempt(None, "", "", None)])
    shown = json.dumps(outcome.logged) + caplog.text
    assert outcome.logged is not None
    assert outcome.logged["***"] == "x" * 150 + "***"
    assert "secret" not in shown


def test_where_nothing_listens_is_one_line() -> None:
    with serving(answering(lambda body: (200, b""))) as url:
        pass
    with pytest.raises(
        UserError, match=f"judging.verifier={url}: .*; start the server, or correct the address"
    ):
        verifier_at(url)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://example.org/score", "expected an https:// address"),
        ("ftp://localhost", "expected an https:// address"),
        ("https://me:secret@example.org", "set DCPO_VERIFIER_KEY"),
        ("https://example.org/?key=secret", "set DCPO_VERIFIER_KEY"),
    ],
)
def test_an_address_that_would_show_a_secret_is_refused(address: str, message: str) -> None:
    JudgingConfig(verifier="https://example.org/score")
    with pytest.raises(ValidationError, match=message):
        JudgingConfig(verifier=address)
