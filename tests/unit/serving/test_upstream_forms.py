"""Answers of an upstream in forms that are not the usual ones: other content types, compressed,
with the length of the body as it was, with numbers that a float does not hold, cut off or filtered.
"""

from __future__ import annotations

import gzip
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import brotli
import httpx2
import pytest
from backports import zstd
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from megatron_dcpo.serving.asking import ask
from megatron_dcpo.serving.finishing import why_not_whole
from megatron_dcpo.serving.json_text import compact, read_json
from megatron_dcpo.serving.middleware import service_of
from megatron_dcpo.serving.proxy import proxy_app
from megatron_dcpo.serving.scorer import Scorer
from tests.helpers.serving import CHAT, COMPLETION, Proxied, logistic, proxied, scorer_with
from tests.helpers.streaming import read_choices, read_events, scored_whole, scoring_with
from tests.helpers.upstream import ANSWER, Served, Upstream, asks, cut


class Written(Upstream):
    """Answers with the bytes, and the headers, that ``write`` makes of its own."""

    def __init__(self, write: Callable[[bytes], tuple[bytes, dict[str, str]]]) -> None:
        super().__init__()
        self.write = write

    async def complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if body.get("stream"):
            content = b"".join([piece async for piece in self.events(body, "messages" in body)])
        else:
            content = (await super().complete(request)).body
        content, headers = self.write(bytes(content))
        return Response(content, headers=headers)


@contextmanager
def writing(write: Callable[[bytes], tuple[bytes, dict[str, str]]]) -> Iterator[Proxied]:
    with proxied(scorer_with(logistic()), Written(write)) as one:
        yield one


@pytest.fixture(scope="module")
def usual() -> Any:
    with proxied(scorer_with(logistic())) as one:
        return one.choice(CHAT)["confidence"]


def assert_both(one: Proxied, usual: Any) -> None:
    """The answer and its stream have the usual confidence, and no log-probs."""
    choice = one.choice(CHAT)
    reply = one.post({**CHAT, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    (streamed,) = read_choices(reply.content).values()
    assert choice["confidence"] == streamed["last"]["confidence"] == usual
    assert choice["logprobs"] is None
    assert b'"logprob"' not in reply.content


KINDS = (None, "text/plain; charset=utf-8", "application/octet-stream", "TEXT/EVENT-STREAM")


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_is_seen_whatever_the_header_says(kind: str | None, usual: Any) -> None:
    def write(content: bytes) -> tuple[bytes, dict[str, str]]:
        return content, {"content-type": kind} if kind else {}

    with writing(write) as one:
        choice = one.choice(CHAT)
        assert choice["confidence"] == usual
        assert choice["logprobs"] is None
        reply = one.post({**CHAT, "stream": True})
        (streamed,) = read_choices(reply.content.replace(b"\r", b"")).values()
        assert streamed["last"]["confidence"] == usual


PACKED = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstd.compress,
}


@pytest.mark.parametrize("coding", PACKED)
def test_a_compressed_answer_is_read(coding: str, usual: Any) -> None:
    def write(content: bytes) -> tuple[bytes, dict[str, str]]:
        kind = "application/json" if content.startswith(b"{") else "text/event-stream"
        return PACKED[coding](content), {"content-encoding": coding, "content-type": kind}

    with writing(write) as one:
        assert_both(one, usual)
        assert "content-encoding" not in one.post(CHAT).headers


def test_what_is_compressed_in_an_unknown_way_is_not_shown() -> None:
    with writing(lambda content: (content, {"content-encoding": "snappy"})) as one:
        reply = one.post(CHAT)
        assert reply.status_code == 502
        assert "logprob" not in reply.text


def test_what_unpacks_to_too_much_is_refused() -> None:
    bomb = gzip.compress(b" " * (80 << 20))
    with writing(lambda content: (bomb, {"content-encoding": "gzip"})) as one:
        assert one.post(CHAT).status_code == 502


def test_headers_about_a_body_are_not_those_of_another_one(usual: Any) -> None:
    def write(content: bytes) -> tuple[bytes, dict[str, str]]:
        kind = "application/json" if content.startswith(b"{") else "text/event-stream"
        headers = {"etag": '"1"', "content-md5": "x", "digest": "x", "x-own": "yes"}
        return content, {**headers, "content-type": kind}

    with writing(write) as one:
        assert_both(one, usual)
        reply = one.post({**CHAT, "stream": True})
        assert not {"content-length", "etag", "content-md5", "digest"} & set(reply.headers)
        assert reply.headers["x-own"] == "yes"


@pytest.mark.parametrize("content", [b"<html>logprobs", b'{"choices": ', b"data: {}\n\n", b""])
def test_what_cannot_be_read_does_not_show_log_probs(content: bytes) -> None:
    with writing(lambda _: (content, {"content-type": "application/json"})) as one:
        assert one.post(CHAT).status_code == 502


@pytest.mark.parametrize("status", [429, 500])
def test_an_error_does_not_show_log_probs_either(status: int) -> None:
    with proxied(scorer_with(logistic())) as one:
        one.upstream.error = (status, {"error": "no", "logprobs": [-0.5], "x": [{"logprob": -1}]})
        reply = one.post(CHAT)
        assert reply.status_code == status
        assert reply.json() == {"error": "no", "logprobs": None, "x": [{"logprob": None}]}


NO_ANSWERS = (
    *(b"", b"<html>log in</html>", b"data: [DONE]\n\n", b"event: ping\ndata: {}\n\n"),
    *(b'data: {"choices": []}\n\ndata: [DONE]\n\n', b'data: {"usage": {}}\n\n'),
)


@pytest.mark.parametrize("content", NO_ANSWERS)
def test_a_stream_without_an_answer_is_an_error(content: bytes) -> None:
    with writing(lambda _: (content, {"content-type": "text/event-stream"})) as one:
        *_, error, last = read_events(one.post({**CHAT, "stream": True}).content)
        assert json.loads(error.data)["error"]["code"] == 502
        assert last.data == "[DONE]"
        counted = httpx2.get(f"{one.at.root}/metrics").text
        assert 'status="502"' in counted


@pytest.mark.parametrize("levels", [90, 974, 978, 5000])
def test_one_depth_is_that_of_whole_answers_and_of_events(levels: int) -> None:
    """Far below Python's, so that what was read can be copied and written wherever that is."""

    def write(content: bytes) -> tuple[bytes, dict[str, str]]:
        deep = b"[" * levels + b"]" * levels
        return content.replace(b'"created":', b'"deep": ' + deep + b', "created":', 1), {}

    with writing(write) as one:
        assert one.post(CHAT).status_code == (200 if levels < 100 else 502)
        reply = one.post({**CHAT, "stream": True})
        assert reply.content.rstrip().endswith(b"[DONE]")
        (streamed,) = read_choices(reply.content).values()
        assert (streamed["last"]["confidence"] is None) == (levels > 100)


class Answers(Upstream):
    """Every answer, of the list of models too, has this status."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__()
        self.status, self.others = status, headers

    async def complete(self, request: Request) -> Response:
        return Response(b"{}", self.status, headers=self.others)

    models = complete


@pytest.mark.parametrize("status", [301, 307, 308])
def test_a_redirect_does_not_lead_round_the_proxy(status: int) -> None:
    upstream = Answers(status, location="http://127.0.0.1:9/v1/models")
    with proxied(scorer_with(logistic()), upstream) as one:
        for reply in (one.post(CHAT), httpx2.get(f"{one.at.url}/models")):
            assert reply.status_code == 502
            assert "location" not in reply.headers
            assert "--endpoint" in reply.text
            assert ":9/" not in reply.text


def test_a_status_that_there_is_not_is_a_bad_gateway() -> None:
    def answer(listening: socket.socket) -> None:
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 600 Odd\r\nContent-Length: 2\r\n\r\n{}")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=answer, args=(listening,), daemon=True).start()
        registry = CollectorRegistry()
        service = service_of(Scorer(), registry)
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with Served(proxy_app(endpoint, service, registry)) as at:
            for method, path in (("GET", "/models"), ("POST", "/completions")):
                reply = httpx2.request(method, at.url + path, content=b"{}")
                assert (reply.status_code, "600" in reply.text) == (502, True)


# --------------------------------------------------------------------------- log-probs of two forms


@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completions"])
@pytest.mark.parametrize("wants", [{}, {"logprobs": 1}, {"logprobs": 0}])
def test_log_probs_are_read_in_the_form_of_either_api(
    body: dict[str, Any], wants: dict[str, Any], usual: Any
) -> None:
    class Other(Upstream):
        """Has the other API's form; as in llama.cpp, 0 alternatives are no log-probs."""

        def wants(self, body: dict[str, Any]) -> bool:
            return bool(body.get("logprobs"))

        def logged(self, tokens: list[str], body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
            return super().logged(tokens, {"top_logprobs": 3, "logprobs": 3}, not is_chat)

    with proxied(scorer_with(logistic()), Other()) as one:
        asked = {**body, **wants}
        if "messages" in body and wants:
            asked = {**body, "logprobs": True, "top_logprobs": wants["logprobs"]}
        choice = one.choice(asked)
        (streamed,) = read_choices(one.post({**asked, "stream": True}).content).values()
        assert choice["confidence"] == streamed["last"]["confidence"] == usual
        assert (choice["logprobs"] is None) == (not wants)


THINKING = ["<think>", "\n", "So 6", ".\n", "</think>", "\n\n", *cut(ANSWER)]


@pytest.mark.parametrize(
    ("tokens", "word"),
    [
        (THINKING, None),
        ([*THINKING, "<|im_end|>"], None),
        (THINKING[1:], None),  # the prompt has opened the thinking
        (THINKING[6:], "no_inputs"),  # of the answer alone
        (THINKING[2:4] + THINKING[6:], "no_inputs"),
    ],
)
def test_behind_a_reasoning_parser_the_tokens_are_the_text(
    tokens: list[str], word: str | None
) -> None:
    def scored(message: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
        logged = Upstream().logged(tokens, {}, True)
        choice = {"index": 0, "message": message, "logprobs": logged, "finish_reason": "stop"}
        reply = scored_whole(
            {"choices": [choice]},
            scoring_with(scorer_with(logistic()), ask(CHAT, "chat", None, {})),
        )
        return dict(reply["choices"][0])

    parsed = scored({"content": ANSWER, "reasoning_content": "So 6."}, tokens)
    if word:
        assert parsed["confidence_reason"].startswith(f"{word}:")
        return
    plain = [token for token in tokens if token != "<|im_end|>"]
    expected = scored({"content": "".join(plain)}, tokens)["confidence"]
    assert parsed["confidence"] == expected is not None
    assert parsed["message"]["content"] == ANSWER.partition("<conf>")[0]


# ------------------------------------------------------------------------------------------ numbers


def test_numbers_that_a_float_cannot_hold_become_null() -> None:
    value = read_json(b'{"a": NaN, "b": [-Infinity, 1e999], "c": 12345678901234567890123}')
    assert compact(value) == b'{"a":null,"b":[null,null],"c":12345678901234567890123}'
    for levels in (101, 970, 100_000):
        with pytest.raises(ValueError, match="100 levels"):
            read_json(b"[" * levels + b"]" * levels)


def test_a_number_out_of_range_is_null_for_the_client() -> None:
    def write(content: bytes) -> tuple[bytes, dict[str, str]]:
        return content.replace(b'"usage":{}', b'"usage":{"x":1e999}'), {}

    with writing(write) as one:
        assert b'"x":null' in one.post(CHAT).content


# ------------------------------------------------------------------------------------ not finished


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("length", "truncated"),
        ("MAX_TOKENS", "truncated"),
        ("content_filter", "filtered"),
        ("", "unfinished"),
        (None, "unfinished"),
        (False, "unfinished"),
        ("null", "unfinished"),
        ("abort", "unfinished"),
        (7, "unfinished"),
        ("tool_calls", "tool_call"),
        ("function_call", "tool_call"),
    ],
)
def test_an_answer_that_is_not_whole_has_no_confidence(reason: Any, word: str) -> None:
    with proxied(scorer_with(logistic())) as one:
        one.upstream.finish_reason = reason
        choice = one.choice(CHAT)
        assert choice["confidence"] is None
        assert choice["confidence_reason"].startswith(f"{word}:")
        (streamed,) = read_choices(one.post({**CHAT, "stream": True}).content).values()
        assert streamed["last"]["confidence"] is None
        assert streamed["last"]["confidence_reason"].startswith(f"{word}:")


def test_a_predictor_that_was_fitted_on_cut_answers_says_so() -> None:
    predictor = logistic()
    assert predictor.record is not None
    fitted = replace(predictor.record, finish_reasons=("length", "stop"))
    with proxied(scorer_with(replace(predictor, record=fitted))) as one:
        one.upstream.finish_reason = "length"
        assert one.choice(CHAT)["confidence"] is not None
        one.upstream.finish_reason = "content_filter"
        assert one.choice(CHAT)["confidence"] is None
    assert why_not_whole({"finish_reason": "Stop"}) == ""


# ----------------------------------------------------------------------------------------- refusals


class RefusesWithTools(Upstream):
    async def complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        if asks(body) and body.get("tools"):
            return Response(b'{"error": "no logprobs with tools"}', 400)
        return await super().complete(request)


def test_what_one_client_is_refused_is_not_refused_to_others() -> None:
    with proxied(scorer_with(logistic()), RefusesWithTools()) as one:
        tools = {**CHAT, "tools": [{"type": "function"}]}
        assert one.choice(CHAT)["confidence"] is not None
        refused = one.choice(tools)
        assert refused["confidence"] is None
        assert refused["confidence_reason"].startswith("no_logprobs:")
        assert one.choice(CHAT)["confidence"] is not None
        assert one.choice({**CHAT, "n": 2})["confidence"] is not None
