"""What a hostile upstream or application tries: log-probs under other names, answers that end in
the middle, bodies that never become whole, what may become a tag and does not.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from megatron_dcpo.serving.middleware import ConfidenceMiddleware, service_of
from megatron_dcpo.serving.streamed_choice import Withheld
from tests.helpers.serving import halving, scorer_with


async def asked_of(app: Any) -> tuple[list[dict[str, Any]], BaseException | None]:
    """What a client gets of an application behind the middleware, and what was raised."""
    service = service_of(scorer_with(halving()), CollectorRegistry())
    body = b'{"model": "policy", "messages": [], "stream": true}'
    sent: list[dict[str, Any]] = []
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not sent and not left.is_set():
            left.set()
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    try:
        await ConfidenceMiddleware(app, service)(scope, receive, send)
    except Exception as error:
        return sent, error
    return sent, None


EVENTS = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
CHUNK = b'data: {"id":"a","choices":[{"index":0,"delta":{"content":"so"}}]}\n\n'


@pytest.mark.parametrize("raises", [False, True])
def test_an_application_that_ends_amid_an_answer_is_an_error(raises: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(EVENTS)
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        if raises:
            raise ValueError("its own")

    sent, error = asyncio.run(asked_of(app))
    content = b"".join(message.get("body", b"") for message in sent)
    assert b'"error"' in content
    assert content.endswith(b"data: [DONE]\n\n")
    assert not sent[-1].get("more_body")
    assert isinstance(error, ValueError) == raises


def test_what_is_withheld_takes_linear_time() -> None:
    """A flood of what may become a tag, whose end is not one; each character is given once."""
    withheld = Withheld("<conf>")
    text = "<conf> " + " " * 100_000 + "Confidence: " + "1" * 100_000
    given = "".join(withheld.add(text[start : start + 997]) for start in range(0, len(text), 997))
    assert given + withheld.take() == text
