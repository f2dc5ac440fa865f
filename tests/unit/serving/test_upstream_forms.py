"""Answers of an upstream in forms that are not the usual ones: other content types, compressed,
with the length of the body as it was, with numbers that a float does not hold, cut off or filtered.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import backports.zstd
import brotli
import pytest
from starlette.requests import Request
from starlette.responses import Response

from megatron_dcpo.serving.finishing import why_not_whole
from megatron_dcpo.serving.json_text import compact, read_json
from tests.helpers.serving import CHAT, Proxied, logistic, proxied, scorer_with
from tests.helpers.streaming import read_choices
from tests.helpers.upstream import Upstream, asks


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
    "zstd": backports.zstd.compress,
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


# ------------------------------------------------------------------------------------------ numbers


def test_numbers_that_a_float_cannot_hold_become_null() -> None:
    value = read_json(b'{"a": NaN, "b": [-Infinity, 1e999], "c": 12345678901234567890123}')
    assert compact(value) == b'{"a":null,"b":[null,null],"c":12345678901234567890123}'
    with pytest.raises(ValueError, match="nested"):
        read_json(b"[" * 100_000)


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
