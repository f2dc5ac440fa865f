"""The policy endpoint with OpenAI's own client, and with requests that it would not send."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from megatron_dcpo.rollout.arrivals import Arrivals
from megatron_dcpo.rollout.openai_server import PolicyEndpoint
from megatron_dcpo.rollout.sampling import SamplingConfig
from megatron_dcpo.rollout.sessions import Session, SessionLimits
from tests.helpers.chat_policy import ScriptedEngine, prompt_of

QUESTION: Any = {"role": "user", "content": "What is 6 x 7?"}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "strict": True,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6}}\n</tool_call>'


def answer(text: str) -> str:
    asked = text.rpartition("<|im_start|>")[0]
    if "<tools>" in text and "tool_response" not in text:
        return f"Let me see.\n{CALL}"
    if "tool_response" in text:
        return "It is 42."
    return "42 of " + str(asked.count("<|im_start|>user"))


class Running:
    """An endpoint with an engine behind it, in a thread."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(answer)
        self.endpoint = PolicyEndpoint(self.engine.chat, "policy")
        self.arrivals = Arrivals()
        self.endpoint.arrivals = self.arrivals
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self.number = 0

    def _serve(self) -> None:
        for responses in self.engine.serve(self.arrivals, SamplingConfig()):
            self.endpoint.deliver(responses)

    def session(self, **limits: int) -> tuple[Session, str]:
        self.number += 1
        given = {"response_tokens": 4000, "sequence_tokens": 8000, "calls": 20} | limits
        chat = self.engine.chat
        prompt = prompt_of([QUESTION], chat, f"p{self.number}")
        session = Session(prompt, 0, chat, SessionLimits(**given))
        return session, self.endpoint.open(session)

    def seal(self, key: str) -> None:
        async def sealed() -> None:
            self.endpoint.seal(key)

        self.endpoint.run(sealed())

    def client(self, key: str, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.endpoint.url}/s/{key}/v1",
            api_key=key,
            **{"max_retries": 0, "timeout": 20.0, **options},
        )

    def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        host = self.endpoint.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=20)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, content, headers or {})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read()), dict(reply.getheaders())

    def close(self) -> None:
        self.arrivals.close()
        self.thread.join()
        self.endpoint.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.close()


def test_a_chat_of_two_turns_with_a_tool(running: Running) -> None:
    session, key = running.session()
    client = running.client(key)
    assert [model.id for model in client.models.list()] == ["policy"]
    messages: list[Any] = [QUESTION]
    first = client.chat.completions.create(model="x", messages=messages, tools=[TOOL])
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    (call,) = choice.message.tool_calls or ()
    assert (call.function.name, json.loads(call.function.arguments)) == ("multiply", {"a": 6})
    # as clients send it: with all that they were told
    messages += [
        choice.message.model_dump(),
        {"role": "tool", "content": "42", "tool_call_id": call.id},
    ]
    second = client.chat.completions.create(model="x", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "It is 42."
    assert second.choices[0].finish_reason == "stop"
    assert second.usage is not None
    assert second.usage.prompt_tokens == len(session.turns[1].prompt.token_ids)
    assert session.turns[1].parent is session.turns[0]
    assert session.retokenized == 0


def test_a_stream_is_the_whole_in_pieces(running: Running) -> None:
    session, key = running.session()
    stream = running.client(key).chat.completions.create(
        model="x",
        messages=[QUESTION],
        tools=[TOOL],
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert call.function is not None
    assert call.function.name == "multiply"
    assert pieces[-1].usage is not None
    assert len(session.turns) == 1


def test_choices_are_turns_of_their_own(running: Running) -> None:
    session, key = running.session()
    reply = running.client(key).chat.completions.create(model="x", messages=[QUESTION], n=3)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert len(session.turns) == 3


def test_completions_stop_where_they_are_told(running: Running) -> None:
    session, key = running.session()
    prompt = running.engine.chat.text_of(session.prompt.token_ids)
    client = running.client(key)
    reply = client.completions.create(
        model="x", prompt=prompt, stop=[" of"], logprobs=1, max_tokens=9
    )
    choice = reply.choices[0]
    assert (choice.text, choice.finish_reason) == ("42", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["4", "2"]
    assert choice.logprobs.token_logprobs == [-0.5, -0.5]
    assert len(session.turns[0].sampled) == 5, "the engine has ended there"
    ids = client.completions.create(model="x", prompt=list(session.prompt.token_ids), max_tokens=2)
    assert (ids.choices[0].text, ids.choices[0].finish_reason) == ("42", "length")


def test_the_sampling_is_the_runs_and_what_is_ignored_is_counted(running: Running) -> None:
    session, key = running.session()
    running.client(key).chat.completions.create(
        model="x", messages=[QUESTION], temperature=0.0, top_p=0.5, seed=3
    )
    assert session.ignored == 3


def test_who_speaks_is_taken_and_counted(running: Running) -> None:
    """AutoGen and LangGraph send names, which no chat template writes."""
    session, key = running.session()
    named: list[Any] = [{**QUESTION, "name": "planner", "cache_control": {"type": "ephemeral"}}]
    client = running.client(key)
    first = client.chat.completions.create(model="x", messages=named)
    named += [{**first.choices[0].message.model_dump(), "name": "solver"}, QUESTION]
    client.chat.completions.create(model="x", messages=named)
    assert session.ignored == 2
    assert session.turns[1].parent is session.turns[0]
    assert session.turns[0].prompt.token_ids == session.prompt.token_ids


@pytest.mark.parametrize(
    "change",
    [
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 1}},
        {"top_logprobs": 3},
        {"n": 17},
        {"n": True},
        {"max_tokens": 0},
        {"stop": [""]},
        {"stop": 3},
        {"tools": [{"type": "web_search"}]},
        {"messages": []},
        {"messages": [{"role": "user", "content": "<|im_end|>"}]},
        {"no_such_field": 1},
        {"stream": "yes"},
        {"prompt": "x"},
        {"echo": True},
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    running: Running, change: dict[str, Any]
) -> None:
    session, key = running.session()
    body = {"model": "x", "messages": [QUESTION], **change}
    status, reply, _ = running.post(f"/s/{key}/v1/chat/completions", body)
    assert status == 400
    (name,) = change
    assert reply["error"]["type"] == "invalid_request_error"
    assert (reply["error"]["param"] or "messages").startswith(name)
    assert session.turns == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a":' * 100_000])
def test_what_is_no_request_is_refused(running: Running, body: bytes) -> None:
    _, key = running.session()
    status, _, _ = running.post(f"/s/{key}/v1/chat/completions", body)
    assert status == 400


@pytest.mark.parametrize(
    "large",
    [
        {"messages": [3] * 4_000_000},
        {"messages": [QUESTION], **{f"field {number}": 1 for number in range(200_000)}},
    ],
    ids=["messages", "fields"],
)
def test_a_large_request_is_refused_as_soon_as_a_small_one(
    running: Running, large: dict[str, Any]
) -> None:
    _, key = running.session()
    body = json.dumps(large).encode()
    began = time.monotonic()
    status, reply, _ = running.post(f"/s/{key}/v1/chat/completions", body)
    assert (status, len(reply["error"]["message"]) < 1000) == (400, True)
    assert time.monotonic() - began < 10


def test_keys(running: Running) -> None:
    """Path, bearer, both; another's, none, and one of a session that is over."""
    _, key = running.session()
    _, other = running.session()
    body = {"model": "x", "messages": [QUESTION]}
    path = "/v1/chat/completions"
    bearer = {"Authorization": f"Bearer {key}"}
    assert running.post(f"/s/{key}{path}", body)[0] == 200
    assert running.post(path, body, bearer)[0] == 200
    assert running.post(f"/s/{key}{path}", body, bearer)[0] == 200
    assert running.post(f"/s/{other}{path}", body, bearer)[0] == 401
    assert running.post(f"/s/{key}x{path}", body)[0] == 401
    assert running.post(path, body)[0] == 401
    assert running.post(f"/s/{key}/v1/responses", body)[0] == 404
    assert running.post(f"/s/{key}{path}", body, {"Host": "example.com"})[0] == 403
    assert running.post(f"/s/{key}{path}", body, {"Origin": "http://example.com"})[0] == 403
    running.seal(key)
    assert running.post(f"/s/{key}{path}", body)[0] == 409
    with pytest.raises(openai.ConflictError):
        running.client(key).chat.completions.create(model="x", messages=[QUESTION])


def test_while_the_weights_change_a_client_asks_again(running: Running) -> None:
    _, key = running.session()
    body = {"model": "x", "messages": [QUESTION]}
    running.endpoint.arrivals = None
    status, _, headers = running.post(f"/s/{key}/v1/chat/completions", body)
    assert (status, headers["retry-after"]) == (503, "1")
    timer = threading.Timer(0.5, setattr, (running.endpoint, "arrivals", running.arrivals))
    timer.start()
    reply = running.client(key, max_retries=3).chat.completions.create(
        model="x", messages=[QUESTION]
    )
    assert reply.choices[0].message.content == "42 of 1"


def test_a_budget_that_is_used_up_is_not_asked_again(running: Running) -> None:
    """Case 10: clients do not repeat a 400."""
    session, key = running.session(calls=1)
    client = running.client(key, max_retries=5)
    client.chat.completions.create(model="x", messages=[QUESTION])
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="x", messages=[QUESTION])
    assert time.monotonic() - began < 10
    assert session.is_out_of_budget


def test_a_retry_joins_the_request_that_it_repeats(running: Running) -> None:
    """Case 5: one commit, one call; an equal body that is no retry is another turn."""
    session, key = running.session()
    body = {"model": "x", "messages": [QUESTION]}
    path = f"/s/{key}/v1/chat/completions"
    before = len(running.engine.calls)
    running.engine.is_stuck = True
    host = running.endpoint.url.removeprefix("http://")
    gone = http.client.HTTPConnection(host, timeout=0.3)
    gone.request("POST", path, json.dumps(body))
    with pytest.raises(TimeoutError):
        gone.getresponse()
    gone.close()
    time.sleep(0.1)
    assert session.turns == []
    running.engine.is_stuck = False
    again = {"x-stainless-retry-count": "1"}
    status, first, _ = running.post(path, body, again)
    assert status == 200
    assert len(running.engine.calls) == before + 1
    assert running.post(path, body, again)[1] == first, "a retry of an answer that got lost"
    assert len(session.turns) == 1
    assert running.post(path, body)[1]["id"] != first["id"]
    assert len(session.turns) == 2
    named = {"Idempotency-Key": "one"}
    third = running.post(path, body, named)[1]
    assert running.post(path, body, named)[1] == third
    assert len(session.turns) == 3


def test_retries_of_equal_requests_repeat_one_each(running: Running) -> None:
    """Two samples of one prompt stay two, also where both have timed out."""
    session, key = running.session()
    body = {"model": "x", "messages": [QUESTION]}
    path = f"/s/{key}/v1/chat/completions"
    running.engine.is_stuck = True
    host = running.endpoint.url.removeprefix("http://")
    clients = [http.client.HTTPConnection(host, timeout=20) for _ in range(2)]
    for number, client in enumerate(clients, start=1):
        client.request("POST", path, json.dumps(body))
        while session.calls < number:
            time.sleep(0.01)
    for client in clients:
        client.close()
    time.sleep(0.1)
    running.engine.is_stuck = False
    again = {"x-stainless-retry-count": "1"}
    replies = [running.post(path, body, again)[1]["id"] for _ in range(2)]
    assert len(set(replies)) == len(session.turns) == session.calls == 2


def test_the_end_of_a_session_gives_up_its_calls(running: Running) -> None:
    """Case 8: the engine is told, the client gets a 409."""
    session, key = running.session()
    running.engine.is_stuck = True
    statuses: list[int] = []
    body = {"model": "x", "messages": [QUESTION]}
    path = f"/s/{key}/v1/chat/completions"
    asking = threading.Thread(target=lambda: statuses.append(running.post(path, body)[0]))
    asking.start()
    while not session.calls:
        time.sleep(0.01)
    time.sleep(0.1)
    running.seal(key)
    asking.join()
    running.engine.is_stuck = False
    assert statuses == [409]
    assert session.turns == []


def test_many_sessions_at_once_with_large_bodies(running: Running) -> None:
    """Case 11, smaller: 48 sessions with long prompts, and a body that is too large."""
    sessions = [running.session(sequence_tokens=1 << 22) for _ in range(48)]
    large = {"role": "system", "content": "x" * (1 << 14)}
    statuses: list[int] = []

    def ask(key: str) -> None:
        body = {"model": "x", "messages": [large, QUESTION], "temperature": 2}
        statuses.append(running.post(f"/s/{key}/v1/chat/completions", body)[0])

    threads = [threading.Thread(target=ask, args=(key,)) for _, key in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 48
    assert all(len(session.turns) == 1 for session, _ in sessions)
    status, _, _ = running.post(f"/s/{sessions[0][1]}/v1/completions", b" " * ((16 << 20) + 1))
    assert status == 413


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_a_compressed_body_is_refused_by_its_header(running: Running, coding: str) -> None:
    _, key = running.session()
    path = f"/s/{key}/v1/completions"
    status, reply, _ = running.post(path, b"\x1f\x8b", {"Content-Encoding": coding})
    assert status == 415
    assert coding in str(reply)
