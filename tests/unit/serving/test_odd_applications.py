"""The middleware around applications that end early, fail, or send more than they should; and how
much of the bodies of requests it holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from megatron_dcpo.runtime.asgi import App, BadRequestError, Message, Receive, Send
from megatron_dcpo.serving.asking import Asked, hide_added
from megatron_dcpo.serving.bounds import Bounds, Gate
from megatron_dcpo.serving.middleware import ConfidenceMiddleware, service_of
from megatron_dcpo.serving.scorer import Scored
from megatron_dcpo.serving.stream import Stream
from tests.helpers.serving import logistic, scorer_with
from tests.helpers.streaming import FIELDS, read_choices, read_events, scoring_with

SCORER = scorer_with(logistic(None))
BODY = {"model": "m", "prompt": "x", "stream": True}


@dataclass
class Answer:
    """What an application's answer has become."""

    status: int = 0
    content: bytes = b""
    is_complete: bool = False
    error: BaseException | None = None


def chunk(text: str, reason: str | None, index: int = 0) -> bytes:
    logged = {"tokens": [text], "token_logprobs": [-0.5]} if text else None
    choice = {"index": index, "text": text, "logprobs": logged, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "a1", "choices": [choice]}).encode() + b"\n\n"


def saying(pieces: Sequence[bytes], is_ended: bool = True, error: Exception | None = None) -> App:
    """An application that answers with these pieces, and then ends its answer or fails."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if error is not None:
            raise error
        if is_ended:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def answer_of(app: App, body: Any = BODY) -> Answer:
    service = service_of(SCORER, CollectorRegistry())
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    answer = Answer()

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            return
        answer.content += message["body"]
        answer.is_complete = not message.get("more_body", False)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    try:
        asyncio.run(ConfidenceMiddleware(app, service)(scope, receive, send))
    except RuntimeError as error:
        answer.error = error
    return answer


@pytest.mark.parametrize("size", range(5))
def test_a_byte_order_mark_may_be_cut(size: int) -> None:
    content = b"\xef\xbb\xbf" + chunk("so ", None) + chunk("\\boxed{6}", "stop")
    whole = read_choices(answer_of(saying([content])).content)
    cut = read_choices(answer_of(saying([content[:size], content[size:]])).content)
    assert cut == whole
    assert cut[0]["text"] == "so \\boxed{6}"
    assert cut[0]["last"]["confidence"] is not None


@pytest.mark.parametrize("error", [None, RuntimeError("out of memory")])
def test_an_application_that_stops_amid_a_stream(error: Exception | None) -> None:
    """What was withheld comes, without a confidence, and the failure is said; an error is the
    server's to log.
    """
    pieces = [chunk("\\boxed{6}\n<conf> 0.", None), b'data: {"id": "a1", "cho']
    answer = answer_of(saying(pieces, is_ended=False, error=error))
    assert answer.is_complete
    assert answer.error is error
    (choice,) = read_choices(answer.content).values()
    assert choice["text"] == "\\boxed{6}\n<conf> 0."
    assert choice["scored"] == 1
    assert choice["last"]["confidence"] is None
    assert choice["last"]["confidence_reason"].startswith("unreadable:")
    *_, failed, done = read_events(answer.content)
    assert json.loads(failed.data)["error"]["code"] == 502
    assert done.data == "[DONE]"


def test_an_application_that_says_nothing() -> None:
    async def silent(scope: Message, receive: Receive, send: Send) -> None:
        """It sends neither a head nor a body."""

    answer = answer_of(silent)
    assert (answer.status, answer.is_complete) == (502, True)
    answer = answer_of(saying([b'{"choices"'], is_ended=False), {**BODY, "stream": False})
    assert (answer.status, answer.is_complete) == (502, True)


def test_a_choice_that_ends_twice_in_one_event_loses_no_text() -> None:
    one = {"index": 0, "text": "so ", "logprobs": None, "finish_reason": "stop"}
    event = {"id": "a1", "choices": [one, {**one, "text": "\\boxed{6}"}]}
    answer = answer_of(saying([b"data: " + json.dumps(event).encode() + b"\n\n"]))
    (choice,) = read_choices(answer.content).values()
    assert choice["text"] == "so \\boxed{6}"
    assert choice["scored"] == 1
    assert answer.content.count(b'"stop"') == 1


@pytest.mark.parametrize("content", [b"<html>Please log in</html>", b""])
def test_a_stream_without_one_event_is_an_error(content: bytes) -> None:
    *_, failed, done = read_events(answer_of(saying([content])).content)
    assert json.loads(failed.data)["error"]["code"] == 502
    assert done.data == "[DONE]"


@pytest.mark.parametrize("status", [99, 600, 999])
def test_a_status_that_there_is_not_is_a_bad_gateway(status: int) -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    answer = answer_of(app)
    assert (answer.status, answer.is_complete) == (502, True)


def test_what_comes_after_a_last_chunk_is_not_gathered() -> None:
    """Of the last chunks of a choice one waits, and of events without choices a few: the client
    gets them all, and one of them has the confidence.
    """
    ending = chunk("", "stop")
    usage = b'data: {"choices": [], "usage": {"total_tokens": 3}}\n\n'
    stream = Stream(scoring_with(SCORER, Asked("completions", BODY, {}, adds_logprobs=True)))

    async def out() -> bytes:
        pieces = [await stream.feed(chunk("\\boxed{6}", None))]
        for _ in range(500):
            pieces.append(await stream.feed(ending + usage))
            assert len(stream.waiting) < 100
        pieces.append(await stream.end())
        return b"".join(pieces)

    content = asyncio.run(out())
    (choice,) = read_choices(content).values()
    assert choice["scored"] == 1
    assert choice["last"]["finish_reason"] == "stop"
    assert choice["last"]["confidence"] is not None
    assert content.count(b'"usage"') == 500
    assert content.count(b'"stop"') == 1


def test_choices_of_a_number_that_was_not_asked_for_are_bounded() -> None:
    asked = Asked("completions", {**BODY, "n": "many"}, {}, adds_logprobs=True)
    stream = Stream(scoring_with(SCORER, asked))
    content = b"".join(chunk("a", None, index) for index in range(5000))
    asyncio.run(stream.feed(content))
    assert len(stream.choices) < 5000
    assert stream.unreadable


@pytest.mark.parametrize(
    "name",
    [
        *("logprobs", "logProbs", "log_probs", "cumulative_logprob", "output_token_logprobs"),
        *("prompt_logprobs", "avg-logprob", "completion_probabilities"),
    ],
)
def test_log_probs_are_hidden_under_any_name(name: str) -> None:
    reply = {"choices": [{"text": "a", name: -0.5}], "meta_info": {"x": [{name: [[-0.5, 1]]}]}}
    hide_added(reply, Asked("completions", {}, {}, adds_logprobs=True))
    assert "0.5" not in json.dumps(reply)
    assert reply["choices"][0]["text"] == "a"


def test_a_reason_is_short_whatever_the_client_sends() -> None:
    scored = Scored(None, None, "logistic", reason=f"mismatch: top_k is {'x' * 100_000}")
    fields = scored.fields()
    assert tuple(fields) == FIELDS
    assert len(fields["confidence_reason"]) < 500


# ------------------------------------------------------------------------------------------- bodies


def test_a_body_counts_while_it_comes() -> None:
    """Half-sent bodies are held as well: together they have the limit of whole ones."""
    gate = Gate(Bounds(held_bytes=100))

    async def piece() -> Message:
        return {"type": "http.request", "body": b"x" * 40, "more_body": True}

    async def many() -> None:
        async with gate.admitted(piece) as first, gate.admitted(piece) as second:
            await first()
            await second()
            assert gate.held_bytes == 80
            with pytest.raises(BadRequestError):
                await first()
        assert gate.held_bytes == 0
        async with gate.admitted(piece) as third:
            await third()

    asyncio.run(many())
