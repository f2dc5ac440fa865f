"""A stream says of each choice what the same answer says that is not streamed, to the last digit,
or that there is no confidence: however it is cut, in whatever order, with whatever fields and
damage. Log-probs that the client did not ask for are in none.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dcpo.serving.asking import Asked
from megatron_dcpo.serving.events import EventDecoder, EventTooLongError
from tests.helpers.serving import halving, logistic, scorer_with
from tests.helpers.streaming import (
    FIELDS,
    read_choices,
    read_events,
    scored_stream,
    scored_whole,
    scoring_with,
)

SECRET = "7172737475"  # the last digits of every log-prob
TOKENS = (
    *("so ", "\\boxed{6}", "\n", "<conf>", "<con", "f>", " Confidence", ": ", "0.83", "0", "."),
    *("é", "\U0001f600", " ", "<", '"', "\\", "x\n"),
)
ENDS = ("\\boxed{6}\n<conf> Confidence: 0.83", "\\boxed{6}", "\\boxed{7}<conf>1", "")
NO_REASON = (None, "", "null", "None", False, "absent")
SLOW = settings(suppress_health_check=list(HealthCheck))


@st.composite
def answers(draw: Any) -> list[dict[str, Any]]:
    """The tokens, log-probs and finish reasons of one to three choices."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.sampled_from(TOKENS), max_size=6))
        end = draw(st.sampled_from(ENDS))
        size = draw(st.integers(1, 9))
        tokens += [end[at : at + size] for at in range(0, len(end), size)]
        values = [float(f"-0.{draw(st.integers(0, 99)):02}{SECRET}") for _ in tokens]
        reason = draw(st.sampled_from(("stop", "stop", "length", "content_filter", "odd")))
        found.append({"tokens": tokens, "values": values, "reason": reason})
    return found


def logged(api: str, tokens: list[str], values: list[float]) -> dict[str, Any] | None:
    if not tokens:
        return None
    if api == "chat":
        rows = zip(tokens, values, strict=True)
        content = [
            {"token": t, "logprob": v, "bytes": list(t.encode()), "top_logprobs": []}
            for t, v in rows
        ]
        return {"content": content}
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": []}


def whole(api: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    choices = []
    for index, one in enumerate(found):
        text = "".join(one["tokens"])
        said: dict[str, Any] = {"text": text}
        if api == "chat":
            said = {"message": {"role": "assistant", "content": text}}
        rows = logged(api, one["tokens"], one["values"])
        choices.append({"index": index, **said, "logprobs": rows, "finish_reason": one["reason"]})
    return {"id": "a1", "choices": choices}


def chunk_of(
    api: str, index: int, tokens: list[str], values: list[float], reason: Any
) -> dict[str, Any]:
    text = "".join(tokens)
    said: dict[str, Any] = {"text": text}
    if api == "chat":
        said = {"delta": {"content": text}}
    chunk = {"index": index, **said, "logprobs": logged(api, tokens, values)}
    if reason != "absent":
        chunk["finish_reason"] = reason
    return chunk


@st.composite
def chunks(draw: Any, api: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chunks of all choices, in an order in which those of each are in order. A finish reason
    stands in the last chunk of a choice, in one of its own, or too early.
    """
    queues = []
    between = draw(st.sampled_from(NO_REASON))
    for index, one in enumerate(found):
        queue = []
        at = 0
        while at < len(one["tokens"]):
            end = at + draw(st.integers(1, 3))
            tokens, values = one["tokens"][at:end], one["values"][at:end]
            queue.append(chunk_of(api, index, tokens, values, between))
            at = end
        place = draw(st.sampled_from(("in the last", "alone", "early")))
        alone = chunk_of(api, index, [], [], one["reason"])
        if place == "in the last" and queue:
            queue[-1]["finish_reason"] = one["reason"]
        elif place == "early" and queue:
            queue.insert(draw(st.integers(0, len(queue) - 1)), alone)
        else:
            queue.append(alone)
        queues.append(queue)
    out = []
    while any(queues):
        turns = [queue for queue in queues if queue]
        together = draw(st.integers(1, len(turns))) if draw(st.booleans()) else 1
        chosen = draw(st.permutations(turns))[:together]
        out.append({"id": "a1", "object": "x", "choices": [queue.pop(0) for queue in chosen]})
    return out


@st.composite
def written(draw: Any, events: list[str]) -> list[bytes]:
    """Data of events as the bytes of a stream, with any fields, line ends and cuts."""
    end = draw(st.sampled_from(("\n", "\r\n", "\r")))
    parts = ["\ufeff"] if draw(st.booleans()) else []
    for data in events:
        lines = [f"data:{draw(st.sampled_from(('', ' ')))}{data}"]
        if draw(st.booleans()) and ', "object"' in data:
            first, second = data.split(', "object"')
            lines = [f"data: {first},", f'data: "object"{second}']
        extra = st.sampled_from((": ping", "event: message", "id: 7", "retry: 9", "odd: 1", "id"))
        lines = draw(st.lists(extra, max_size=2)) + lines + draw(st.lists(extra, max_size=1))
        parts += [end.join(lines), end, end]
    if draw(st.booleans()):
        parts.pop()  # the last event has no end
    content = "".join(parts).encode()
    cuts = draw(st.lists(st.integers(0, len(content)), max_size=12))
    edges = [0, *sorted(cuts), len(content)]
    return [content[a:b] for a, b in pairwise(edges)]


def assert_hidden(out: bytes) -> None:
    assert SECRET.encode() not in out


def asked_for(api: Any, count: int) -> Asked:
    return Asked(api, {"n": count, "stream": True}, {}, adds_logprobs=True)


SCORERS = {
    "logistic": scorer_with(logistic(None)),
    "halving": scorer_with(halving(None)),
}


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("scorer", SCORERS.values(), ids=list(SCORERS))
@given(data=st.data())
@SLOW
def test_a_stream_says_what_the_whole_answer_says(api: str, scorer: Any, data: Any) -> None:
    found = data.draw(answers())
    scoring = scoring_with(scorer, asked_for(api, len(found)))
    expected = scored_whole(whole(api, found), scoring)["choices"]
    events = [json.dumps(chunk) for chunk in data.draw(chunks(api, found))]
    if data.draw(st.booleans()):
        events.append('{"id": "a1", "choices": [], "usage": {"total_tokens": 3}}')
    if data.draw(st.booleans()):
        events.append("[DONE]")
    out = scored_stream(data.draw(written(events)), scoring)
    assert_hidden(out)
    choices = read_choices(out)
    assert set(choices) == set(range(len(found)))
    for index, choice in choices.items():
        same = expected[index]
        text = same["message"]["content"] if api == "chat" else same["text"]
        assert choice["text"] == text
        assert choice["scored"] == 1
        assert {name: choice["last"][name] for name in FIELDS} == {
            name: same[name] for name in FIELDS
        }
        assert choice["last"]["finish_reason"] == found[index]["reason"]
    assert sum(b'"usage"' in event.data.encode() for event in read_events(out)) == sum(
        '"usage"' in event for event in events
    )


def numbers_for_texts(text: str) -> str:
    chunk = json.loads(text)
    for choice in chunk["choices"]:
        choice.update(delta=7, text=7)
    return json.dumps(chunk)


DAMAGES: dict[str, Any] = {
    "cut": lambda text: text[: len(text) // 2],
    "not JSON": lambda text: "{" + text,
    "another name of choices": lambda text: text.replace('"choices"', '"choicez"'),
    "choices are an object": lambda text: text.replace('"choices": [', '"choices": {"0": [') + "}",
    "a large index": lambda text: text.replace('"index": 0', '"index": 9'),
    "a negative index": lambda text: text.replace('"index": 0', '"index": -1'),
    "an index that is text": lambda text: text.replace('"index": 0', '"index": "0"'),
    "log-probs are a list": lambda text: text.replace('"logprobs": {', '"logprobs": [{') + "]",
    "another name of the log-probs": lambda text: text.replace('"logprobs": {', '"logprob": {'),
    "log-probs that are no numbers": lambda text: text.replace("-0.", "NaN, -0."),
    "another name of the text": lambda text: text.replace('"text"', '"message"'),
    "a list of parts": lambda text: text.replace('"content": "', '"content": ["'),
    "an error": lambda text: '{"error": {"message": "the upstream is ill"}}',
    "a list": lambda text: f"[{text}]",
    "a number": lambda text: "3",
    "texts that are numbers": lambda text: numbers_for_texts(text),
}


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@given(data=st.data())
@settings(SLOW, max_examples=12)
def test_a_damaged_stream_has_the_right_confidence_or_none(
    api: str, damage: Any, data: Any
) -> None:
    found = data.draw(answers())
    scoring = scoring_with(SCORERS["logistic"], asked_for(api, len(found)))
    expected = scored_whole(whole(api, found), scoring)["choices"]
    events = [json.dumps(chunk) for chunk in data.draw(chunks(api, found))]
    place = data.draw(st.integers(0, len(events) - 1))
    events[place] = damage(events[place])
    out = scored_stream(data.draw(written([*events, "[DONE]"])), scoring)
    assert_hidden(out)
    for event in read_events(out):
        assert event.data == "[DONE]" or json.loads(event.data)
    for index, choice in read_choices(out).items():
        last = choice["last"]
        if "confidence" in last and last["confidence"] is not None:
            assert last["confidence"] == expected[index]["confidence"]
        elif index in range(len(found)) and choice["scored"]:
            assert last["confidence_reason"]


@pytest.mark.parametrize("reason", ["", "null", "None", "none", False, None])
def test_a_reason_that_is_none_ends_nothing(reason: Any) -> None:
    scoring = scoring_with(SCORERS["logistic"], asked_for("completions", 1))
    tokens, values = ["\\boxed{6}", " x"], [-0.1, -0.2]
    first = chunk_of("completions", 0, tokens[:1], values[:1], reason)
    second = chunk_of("completions", 0, tokens[1:], values[1:], reason)
    events = [b"data: " + json.dumps({"choices": [c]}).encode() + b"\n\n" for c in (first, second)]
    out = scored_stream([*events, b"data: [DONE]\n\n"], scoring)
    (choice,) = read_choices(out).values()
    assert choice["text"] == "\\boxed{6} x"
    assert choice["last"]["confidence"] is None
    assert choice["last"]["confidence_reason"].startswith("unfinished:")


def test_a_confidence_of_the_upstreams_is_not_passed_on() -> None:
    scoring = scoring_with(SCORERS["logistic"], asked_for("completions", 1))
    chunks = [
        chunk_of("completions", 0, ["\\boxed{6}"], [-0.1], None),
        chunk_of("completions", 0, [" x"], [-0.2], "stop"),
    ]
    for chunk in chunks:
        chunk.update(dict.fromkeys(FIELDS, 0.99))
    events = [b"data: " + json.dumps({"choices": [c]}).encode() + b"\n\n" for c in chunks]
    out = scored_stream([*events, b"data: [DONE]\n\n"], scoring)
    assert b"0.99" not in out
    (choice,) = read_choices(out).values()
    assert choice["scored"] == 1
    assert choice["last"]["confidence"] is not None


def test_an_error_beside_an_answer_leaves_it_without_a_confidence() -> None:
    scoring = scoring_with(SCORERS["logistic"], asked_for("completions", 1))
    chunk = chunk_of("completions", 0, ["\\boxed{6}"], [-0.1], "stop")
    event = {"choices": [chunk], "error": {"message": "overloaded"}}
    out = scored_stream([b"data: " + json.dumps(event).encode() + b"\n\n"], scoring)
    (streamed,) = read_choices(out).values()
    (whole_one,) = scored_whole(event, scoring)["choices"]
    for choice in (streamed["last"], whole_one):
        assert choice["confidence"] is None
        assert choice["confidence_reason"]


def test_an_answer_that_calls_a_tool_has_no_confidence() -> None:
    scoring = scoring_with(SCORERS["logistic"], asked_for("chat", 1))
    first = chunk_of("chat", 0, ["wait"], [-0.1], None)
    call = {"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": "tool_calls"}
    events = [b"data: " + json.dumps({"choices": [c]}).encode() + b"\n\n" for c in (first, call)]
    (choice,) = read_choices(scored_stream(events, scoring)).values()
    assert choice["last"]["confidence"] is None
    assert choice["last"]["confidence_reason"].startswith("tool_call:")


# ------------------------------------------------------------------------------------------- events


@given(data=st.data())
@SLOW
def test_events_are_those_that_another_decoder_finds(data: Any) -> None:
    line = st.sampled_from(
        (
            "data: a",
            "data:b",
            "data",
            "data:  c",
            "event: x",
            ": c",
            "",
            "",
            "id: 1",
            "retry: 5",
            "é",
        )
    )
    ends = st.sampled_from(("\n", "\r", "\r\n"))
    lines = data.draw(st.lists(st.tuples(line, ends), max_size=20))
    content = "".join(text + end for text, end in lines).encode() + b"\n\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    edges = [0, *cuts, len(content)]
    decoder = EventDecoder(1 << 20)
    found = []
    for a, b in pairwise(edges):
        found += list(decoder.feed(content[a:b]))
    found += list(decoder.feed(b"", is_last=True))
    events = [event for event in found if event.data is not None]
    others = [event for event in read_events(content) if event.data or "data" in str(lines)]
    assert [event.data for event in events if event.data] == [e.data for e in others if e.data]
    again = b"".join(event.encoded() for event in found)
    assert [e.data for e in read_events(again) if e.data] == [e.data for e in others if e.data]


def test_an_event_that_is_too_long_is_refused_while_it_comes() -> None:
    decoder = EventDecoder(longest=100)
    list(decoder.feed(b"data: " + b"x" * 90 + b"\n\n"))
    list(decoder.feed(b": " + b"c" * 90 + b"\n" + b"data: 1"))
    with pytest.raises(EventTooLongError):
        list(decoder.feed(b"data: xxxxxxx\n" * 10))


def test_a_long_stream_is_passed_on_and_not_scored() -> None:
    scoring = scoring_with(SCORERS["logistic"], asked_for("completions", 1), reply_bytes=2000)
    events = []
    for number in range(40):
        reason = "stop" if number == 39 else None
        chunk = chunk_of("completions", 0, [f"word {number} <"], [-0.1], reason)
        events.append(b"data: " + json.dumps({"choices": [chunk]}).encode() + b"\n\n")
    (choice,) = read_choices(scored_stream(events, scoring)).values()
    assert choice["text"] == "".join(f"word {number} <" for number in range(40))
    assert choice["last"]["confidence"] is None
    assert choice["last"]["confidence_reason"].startswith("unreadable:")
