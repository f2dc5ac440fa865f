"""The property of ``test_streams.py`` through the whole middleware, as vLLM runs it: an answer that
the application streams, in any pieces, has the confidence of the same answer in one piece.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dcpo.runtime.asgi import App, Message, Receive, Send
from tests.helpers.streaming import FIELDS, read_choices
from tests.unit.serving.test_odd_applications import answer_of, saying
from tests.unit.serving.test_streams import (
    DAMAGES,
    SLOW,
    answers,
    assert_hidden,
    chunks,
    whole,
    written,
)

API = "completions"  # the path that answer_of asks


def in_one_piece(reply: dict[str, Any]) -> App:
    """An application that does not stream."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        content = json.dumps(reply).encode()
        await send({"type": "http.response.body", "body": content, "more_body": False})

    return app


def asked(count: int, stream: bool) -> dict[str, Any]:
    return {"model": "m", "prompt": "x", "n": count, "stream": stream}


@given(data=st.data())
@SLOW
def test_a_stream_says_what_the_answer_in_one_piece_says(data: Any) -> None:
    found = data.draw(answers())
    together = answer_of(in_one_piece(whole(API, found)), asked(len(found), stream=False))
    expected = json.loads(together.content)["choices"]
    events = [json.dumps(chunk) for chunk in data.draw(chunks(API, found))]
    answer = answer_of(saying(data.draw(written([*events, "[DONE]"]))), asked(len(found), True))
    assert answer.status == 200
    assert answer.is_complete
    assert_hidden(answer.content)
    choices = read_choices(answer.content)
    assert set(choices) == set(range(len(found)))
    for index, choice in choices.items():
        assert choice["text"] == expected[index]["text"]
        assert choice["scored"] == 1
        for name in FIELDS:
            assert choice["last"][name] == expected[index][name]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@given(data=st.data())
@settings(SLOW, max_examples=8)
def test_a_damaged_stream_has_the_right_confidence_or_none(damage: Any, data: Any) -> None:
    found = data.draw(answers())
    together = answer_of(in_one_piece(whole(API, found)), asked(len(found), stream=False))
    expected = json.loads(together.content)["choices"]
    events = [json.dumps(chunk) for chunk in data.draw(chunks(API, found))]
    place = data.draw(st.integers(0, len(events) - 1))
    events[place] = damage(events[place])
    answer = answer_of(saying(data.draw(written([*events, "[DONE]"]))), asked(len(found), True))
    assert_hidden(answer.content)
    for index, choice in read_choices(answer.content).items():
        confidence = choice["last"].get("confidence")
        if confidence is not None:
            assert confidence == expected[index]["confidence"]
