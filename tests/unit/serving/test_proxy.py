"""What a client gets through the proxy: confidences, hidden log-probs, the text without its tag;
everything else as the upstream says it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from megatron_dcpo.serving.scorer import Scorer
from tests.helpers.serving import CHAT, COMPLETION, Proxied, halving, logistic, proxied, scorer_with
from tests.helpers.upstream import ANSWER, chunks_of, cut, events_of

SHOWN = ANSWER.partition("<conf>")[0]
FIELDS = {
    "confidence",
    "confidence_raw",
    "confidence_source",
    "confidence_reason",
    "confidence_abstains",
}
BOTH = pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completions"])


@pytest.fixture
def proxy() -> Iterator[Proxied]:
    with proxied(scorer_with(logistic())) as one:
        yield one


def text_of(choice: dict[str, Any]) -> Any:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def streamed(proxy: Proxied, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By index, the joined text of a stream, and the last chunk of the choice."""
    reply = proxy.post({**body, "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_of(reply.content)
    assert events[-1] == b"data: [DONE]"
    assert b": a comment" in events
    found: dict[int, dict[str, Any]] = {}
    for event in chunks_of(events):
        (choice,) = event["choices"]
        one = found.setdefault(choice["index"], {"joined": "", "rows": []})
        assert FIELDS.isdisjoint(one), "the confidence is in the last chunk"
        piece = choice["text"] if "text" in choice else choice["delta"]["content"]
        one["joined"] += piece
        one["rows"] += (choice["logprobs"] or {}).get("content", [])
        one.update({key: choice[key] for key in choice if key not in ("text", "delta")})
    return found


@BOTH
def test_a_choice_has_a_confidence_and_no_log_probs(proxy: Proxied, body: dict[str, Any]) -> None:
    direct = httpx2.post(
        proxy.behind.url + ("/chat/completions" if "messages" in body else "/completions"),
        json=body,
    ).json()
    reply = proxy.post(body).json()
    (choice,) = reply["choices"]
    assert proxy.upstream.asked[-1]["logprobs"] in (True, 0)
    assert 0 < choice["confidence"] < 1
    assert choice["confidence_raw"] == 0.83
    assert choice["confidence_source"] == "logistic of response"
    assert choice["confidence_reason"] is None
    assert choice["confidence_abstains"] is None
    assert choice["logprobs"] is None
    assert text_of(choice) == SHOWN
    for field in FIELDS:
        del choice[field]
    (same,) = direct["choices"]
    holder = same.get("message", same)
    name = "content" if "message" in same else "text"
    holder[name] = SHOWN
    assert choice == same
    for key in ("object", "created", "model", "usage"):
        assert reply[key] == direct[key]


@BOTH
@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_a_stream_says_what_a_whole_reply_says(
    proxy: Proxied, body: dict[str, Any], size: int
) -> None:
    """However the tag is cut, with several choices, to the last digit."""
    proxy.upstream.tokens = lambda text: cut(text, size)
    proxy.upstream.says = lambda asked, index: (
        ANSWER if index == 0 else f"a <con and <conf> 3 x {ANSWER}"
    )
    whole = proxy.post({**body, "n": 2}).json()["choices"]
    parts = streamed(proxy, {**body, "n": 2})
    assert set(parts) == {0, 1}
    for choice in whole:
        part = parts[choice["index"]]
        assert part["joined"] == text_of(choice)
        assert part["finish_reason"] == "stop"
        assert part["logprobs"] is None
        for field in FIELDS:
            assert part[field] == choice[field], field
    assert whole[0]["confidence"] is not None
    assert text_of(whole[1]).endswith("0.83"), "two tags are no well-formed block"
    assert whole[1]["confidence_raw"] is None


def test_who_asks_for_log_probs_gets_them_and_the_text_they_make_up(proxy: Proxied) -> None:
    choice = proxy.choice({**CHAT, "logprobs": True, "top_logprobs": 3})
    assert text_of(choice) == ANSWER
    rows = choice["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == ANSWER
    assert {len(row["top_logprobs"]) for row in rows} == {3}
    assert choice["confidence"] is not None
    part = streamed(proxy, {**CHAT, "logprobs": True})[0]
    assert part["joined"] == ANSWER
    assert "".join(row["token"] for row in part["rows"]) == ANSWER
    assert part["confidence"] == choice["confidence"]


@BOTH
def test_more_alternatives_than_the_client_asked_for_are_hidden(body: dict[str, Any]) -> None:
    """A predictor of entropies reads 20."""
    entropies = replace(halving(), source="token_entropy")
    with proxied(scorer_with(entropies)) as proxy:
        asked = {"logprobs": True, "top_logprobs": 2}
        if "prompt" in body:
            asked = {"logprobs": 2}
        logged = proxy.choice({**body, **asked})["logprobs"]
        sent = proxy.upstream.asked[-1]
        assert sent.get("top_logprobs", sent["logprobs"]) == 20
        if "prompt" in body:
            assert {len(row) for row in logged["top_logprobs"]} == {2}
        else:
            assert {len(row["top_logprobs"]) for row in logged["content"]} == {2}
        assert proxy.choice(body)["logprobs"] is None


def test_a_predictor_of_what_is_stated_asks_for_no_log_probs() -> None:
    with proxied(scorer_with(halving())) as proxy:
        choice = proxy.choice(CHAT)
        assert "logprobs" not in proxy.upstream.asked[-1]
    assert choice["confidence"] == pytest.approx(0.415)
    assert choice["confidence_raw"] == 0.83


def test_without_a_predictor_the_confidence_is_the_stated_one() -> None:
    with proxied(Scorer()) as proxy:
        choice = proxy.choice({"messages": [{"role": "user", "content": "2*3="}]})
        assert proxy.upstream.asked[-1] == {"messages": [{"role": "user", "content": "2*3="}]}
    assert choice["confidence"] == choice["confidence_raw"] == 0.83
    assert choice["confidence_source"] == "stated"


def test_the_tag_can_stay() -> None:
    with proxied(Scorer(keep_tag=True)) as proxy:
        assert text_of(proxy.choice(CHAT)) == ANSWER
        assert streamed(proxy, CHAT)[0]["joined"] == ANSWER


# ------------------------------------------------------------------------- what cannot be computed


@pytest.mark.parametrize(
    ("says", "finish", "reason"),
    [
        ("\\boxed{6}", "stop", "missing"),
        ("\\boxed{6} <conf> 0.5 <conf> 0.6", "stop", "multiple"),
        ("\\boxed{6} <conf> very", "stop", "unparsable"),
        ("\\boxed{6} <conf> 85", "stop", "out_of_range"),
        ("\\boxed{6} <conf> 0.8 or so", "stop", "trailing_text"),
        ("<conf> 0.8 \\boxed{6}", "stop", "trailing_text"),
        ("\\boxed{6} <conf> 0.8", "length", "truncated"),
        ("", "stop", "no_text"),
    ],
)
def test_what_is_not_stated_is_null_and_nothing_is_lost(
    says: str, finish: str, reason: str
) -> None:
    with proxied(Scorer()) as proxy:
        proxy.upstream.says = lambda body, index: says
        proxy.upstream.finish_reason = finish
        choice = proxy.choice(CHAT)
        assert choice["confidence"] is None
        assert choice["confidence_reason"].partition(":")[0] in (reason, "before_box")
        assert text_of(choice) == says
        if says:
            part = streamed(proxy, CHAT)[0]
            assert part["joined"] == says
            assert part["confidence_reason"] == choice["confidence_reason"]


def test_without_log_probs_there_is_no_confidence(proxy: Proxied) -> None:
    proxy.upstream.logs = False
    for choice in (proxy.choice(CHAT), streamed(proxy, CHAT)[0]):
        assert choice["confidence"] is None
        assert choice["confidence_reason"].startswith("no_logprobs:")
        assert choice["confidence_raw"] == 0.83


def test_an_upstream_that_refuses_log_probs_is_asked_as_the_client_asked(proxy: Proxied) -> None:
    proxy.upstream.refuses_logprobs = True
    choice = proxy.choice(CHAT)
    assert text_of(choice) == SHOWN
    assert choice["confidence"] is None
    assert "does not support logprobs" in choice["confidence_reason"]
    assert len(proxy.upstream.asked) == 2
    assert proxy.upstream.asked[-1] == CHAT
    assert streamed(proxy, CHAT)[0]["confidence"] is None
    refused = proxy.post({**CHAT, "logprobs": True})
    assert refused.status_code == 400, "the client's own log-probs are the client's"


def test_a_number_that_json_does_not_have_is_null() -> None:
    """The log of a probability of 0; the predictor is clipped there."""
    with proxied(scorer_with(replace(halving(), source="token_mean_logprob"))) as proxy:
        logged = proxy.upstream.logged

        def impossible(*given: Any) -> dict[str, Any]:
            found = logged(*given)
            for row in found["content"]:
                row["logprob"] = -9999.0
            return found

        proxy.upstream.logged = impossible  # type: ignore[method-assign]
        choice = proxy.choice(CHAT)
        assert choice["confidence"] == 0.0
        assert choice["confidence_raw"] is None


def test_a_call_of_a_tool_has_none(proxy: Proxied) -> None:
    proxy.upstream.tool = True
    choice = proxy.choice({**CHAT, "tools": []})
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert choice["message"]["content"] is None
    assert choice["confidence"] is None
    assert choice["confidence_reason"].startswith("no_text:")


def test_a_text_that_begins_with_the_prompt_has_none(proxy: Proxied) -> None:
    choice = proxy.choice({**COMPLETION, "echo": True})
    assert choice["confidence"] is None
    assert choice["confidence_reason"].startswith("echo:")


# ------------------------------------------------------------------------------- errors and others


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_an_error_of_the_upstream_is_the_clients(proxy: Proxied, status: int) -> None:
    content = {"error": {"message": "no", "odd": [1, None]}, "detail": "ü"}
    proxy.upstream.error = (status, content)
    for body in (CHAT, {**CHAT, "stream": True}):
        reply = proxy.post(body)
        assert reply.status_code == status
        assert reply.json() == content


def test_two_other_paths_pass_through_and_no_more(proxy: Proxied) -> None:
    reply = httpx2.get(f"{proxy.at.root}/health?x=1")
    assert (reply.text, reply.headers["x-own"]) == ("well", "yes")
    assert httpx2.get(f"{proxy.at.url}/models").json()["data"][0]["id"] == "policy"
    assert httpx2.get(f"{proxy.at.url}/chat/completions").status_code == 405
    assert httpx2.post(f"{proxy.at.url}/models").status_code == 405
    for path in ("/v1/embeddings", "/v1/chat/completions/", "/nothing", "/v1/models/policy"):
        reply = httpx2.post(proxy.at.root + path, json=CHAT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, 404)
    assert proxy.upstream.asked == []


def test_the_clients_key_is_the_upstreams(proxy: Proxied) -> None:
    url = f"{proxy.at.url}/chat/completions"
    httpx2.post(url, json=CHAT, headers={"Authorization": "Bearer abc", "X-Own": "1"})
    got = proxy.upstream.headers[-1]
    assert got["authorization"] == "Bearer abc"
    assert got["x-own"] == "1"
    assert got["accept-encoding"] == "identity"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"", b"\xff", b"[" * 100_000])
def test_a_body_that_is_not_json_is_refused_in_one_line(proxy: Proxied, content: bytes) -> None:
    reply = httpx2.post(f"{proxy.at.url}/chat/completions", content=content)
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert "JSON" in message
    assert "\n" not in message
    assert proxy.upstream.asked == []
    assert proxy.choice(CHAT)["confidence"] is not None


def test_a_prompt_of_10_mb_arrives(proxy: Proxied) -> None:
    long = {**COMPLETION, "prompt": COMPLETION["prompt"] + "ü" * 5_000_000}
    assert proxy.choice(long)["confidence"] is not None
    assert proxy.upstream.asked[-1]["prompt"] == long["prompt"]


def test_a_body_without_end_is_refused(proxy: Proxied) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(80):
            yield b" " * (1 << 20)

    try:
        reply = httpx2.post(f"{proxy.at.url}/chat/completions", content=pieces(), timeout=30)
        assert reply.status_code == 413
    except httpx2.WriteError:  # the answer came before the body was sent
        pass
    assert proxy.upstream.asked == []
    assert proxy.choice(CHAT)["confidence"] is not None


def test_a_dead_upstream_is_a_bad_gateway(proxy: Proxied) -> None:
    proxy.behind.__exit__()
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
        reply = httpx2.request(method, proxy.at.root + path, json=CHAT)
        assert reply.status_code == 502
        assert proxy.behind.url in reply.json()["error"]["message"]


def test_an_upstream_that_dies_in_a_stream_is_said_and_what_came_is_there(proxy: Proxied) -> None:
    tokens = cut(ANSWER)
    proxy.upstream.breaks = len(tokens) - 1
    with httpx2.stream(
        "POST", f"{proxy.at.url}/chat/completions", json={**CHAT, "stream": True}
    ) as reply:
        events = events_of(reply.read())
    assert events[-2]["error"]["code"] == 502
    assert events[-1] == b"data: [DONE]"
    choices = [chunk["choices"][0] for chunk in chunks_of(events)]
    text = "".join(choice["delta"]["content"] for choice in choices)
    assert text == "".join(tokens[:-1]), "the withheld tag included"
    assert choices[-1]["confidence"] is None
    assert choices[-1]["confidence_reason"].startswith("unreadable:")
    proxy.upstream.breaks = None
    assert streamed(proxy, CHAT)[0]["confidence"] is not None


def test_the_upstreams_request_ends_when_the_client_leaves(proxy: Proxied) -> None:
    proxy.upstream.pause = 0.2
    body = json.dumps({**CHAT, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", proxy.at.port)) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert b"200 OK" in client.recv(1000)
    deadline = time.monotonic() + 10
    while not proxy.upstream.left:
        assert time.monotonic() < deadline, "the upstream still writes"
        time.sleep(0.02)
    page = httpx2.get(f"{proxy.at.root}/metrics").text
    assert 'dcpo_requests_total{path="/v1/chat/completions",status="499"} 1.0' in page
