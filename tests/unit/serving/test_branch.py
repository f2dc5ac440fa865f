"""The number behind each turn of a chat, from a stand-in whose tokens are characters: asked for on
a branch of exactly the tokens of the turn, of which neither the client nor the next turn sees
anything.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from megatron_dcpo.serving.bounds import Bounds
from megatron_dcpo.serving.middleware import ConfidenceMiddleware, service_of
from megatron_dcpo.serving.proxy import proxy_app
from megatron_dcpo.serving.scorer import Scorer
from tests.helpers.serving import FITTED_ON, by_turn, scorer_with, second_curve
from tests.helpers.upstream import Served, chunks_of, events_of

END = 0  # the id of the token that ends an answer
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
QUESTION = {"role": "user", "content": "2*3="}
FITTED = replace(FITTED_ON, templates=("chat",), instructions=((),), temperatures=(0.7,))
USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class Policy:
    """``says(prompt, index)`` is the answer to a chat or a text, ``states(text)`` what follows a
    line that asks. ``asked`` has path and body of each request, ``headers`` its headers. ``fails``
    is a path that fails, ``hangs`` one that does not answer, ``repeats`` one that refuses a body
    and names it.
    """

    def __init__(self) -> None:
        self.says: Callable[[str, int], str] = lambda prompt, _: (
            "It is \\boxed{6}." if "tool:" in prompt else CALL
        )
        self.states: Callable[[str], str] = lambda text: " 0.75" if "boxed" in text else " 0.25"
        self.names_ids = True
        self.refuses_ids = False
        self.fails = self.hangs = self.repeats = ""
        self.reason = "stop"
        self.stop_reason: str | None = None
        self.number_reason = "stop"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[dict[str, str]] = []
        paths = {"/v1/chat/completions": "answer", "/v1/completions": "answer"}
        paths |= {"/tokenize": "tokenize", "/detokenize": "detokenize"}
        self.app = Starlette(
            routes=[
                Route(path, self.kept(path, one), methods=["POST"]) for path, one in paths.items()
            ]
        )

    def kept(self, path: str, name: str) -> Any:
        async def kept(request: Request) -> Response:
            body = await request.json()
            self.asked.append((path, body))
            self.headers.append(dict(request.headers))
            is_branch = path != "/v1/chat/completions"
            if path == self.hangs and is_branch:
                await asyncio.sleep(60)
            if path == self.fails and is_branch:
                return JSONResponse({"error": "broken"}, status_code=500)
            if path == self.repeats and is_branch:
                return JSONResponse({"detail": [{"input": body}]}, status_code=422)
            answer: Response = getattr(self, name)(body)
            return answer

        return kept

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for at, body in self.asked if at == path]

    def tokenize(self, body: dict[str, Any]) -> Response:
        assert body["add_special_tokens"] is False
        return JSONResponse({"tokens": ids_of(body["prompt"])})

    def detokenize(self, body: dict[str, Any]) -> Response:
        return JSONResponse({"prompt": text_of(body["tokens"])})

    def answer(self, body: dict[str, Any]) -> Response:
        if self.refuses_ids and body.get("return_token_ids"):
            return JSONResponse({"error": "return_token_ids?"}, status_code=400)
        prompt = body.get("prompt", "")
        if isinstance(prompt, list):
            text = self.states(text_of(prompt))
            choice = {"index": 0, "text": text, "finish_reason": self.number_reason}
            return JSONResponse({"choices": [choice], "usage": USAGE})
        if "messages" in body:
            prompt = "".join(f"{m['role']}: {m.get('content') or CALL}\n" for m in body["messages"])
        texts = [self.says(prompt, index) for index in range(body.get("n") or 1)]
        if body.get("stream"):
            return StreamingResponse(
                self.events(body, prompt, texts), media_type="text/event-stream"
            )
        choices = [self.whole(body, prompt, text, n) for n, text in enumerate(texts)]
        reply = {"choices": choices, "usage": USAGE}
        if "messages" in body:
            reply |= self.prompt_ids(body, prompt)
        return JSONResponse(reply)

    def names(self, body: dict[str, Any]) -> bool:
        return self.names_ids and bool(body.get("return_token_ids"))

    def prompt_ids(self, body: dict[str, Any], prompt: str) -> dict[str, Any]:
        return {"prompt_token_ids": ids_of(prompt) if self.names(body) else None}

    def ids(self, text: str) -> list[int]:
        ends = self.reason == "stop" and self.stop_reason is None
        return ids_of(text) + ([END] if ends else [])

    def shown(self, text: str) -> str:
        return text.removesuffix(self.stop_reason or "")

    def whole(self, body: dict[str, Any], prompt: str, text: str, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": self.reason,
            "stop_reason": self.stop_reason,
            "token_ids": self.ids(text) if self.names(body) else None,
        }
        if "messages" not in body:
            return choice | {"text": self.shown(text)} | self.prompt_ids(body, prompt)
        message: dict[str, Any] = {"role": "assistant", "content": self.shown(text)}
        if text == CALL:
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            message |= {"content": None, "tool_calls": [call]}
            choice["finish_reason"] = "tool_calls"
        return choice | {"message": message}

    async def events(
        self, body: dict[str, Any], prompt: str, texts: list[str]
    ) -> AsyncIterator[bytes]:
        """A head, a chunk for every three tokens, one with a call, the end, and the usage."""
        is_chat = "messages" in body
        for index, text in enumerate(texts):
            last = self.whole(body, prompt, text, index)
            ids = last.pop("token_ids")
            message = last.pop("message", None) or {"content": last.pop("text", None)}
            shown = message["content"] or ""
            first = self.prompt_ids(body, prompt)
            of_chat, of_choice = (first, {}) if is_chat else ({}, last)
            begun = {"index": index, **of_choice, "content": "", "finish_reason": None}
            yield self.event(begun, of_chat, is_chat)
            last.pop("prompt_token_ids", None)
            size = 3
            for at in range(0, max(len(ids or ()), len(shown)), size):
                part = ids[at : at + size] if ids else None
                choice = {"index": index, "token_ids": part}
                if shown[at:] or not is_chat:  # vLLM writes an empty delta while a call comes
                    choice["content"] = shown[at : at + size]
                yield self.event({**choice, "finish_reason": None}, {}, is_chat)
            if "tool_calls" in message:
                choice = {"index": index, "tool_calls": message["tool_calls"]}
                yield self.event({**choice, "finish_reason": None}, {}, is_chat)
            yield self.event({**last, "token_ids": [] if ids else None}, {}, is_chat)
        yield b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def event(self, choice: dict[str, Any], head: dict[str, Any], is_chat: bool) -> bytes:
        delta = {n: choice.pop(n) for n in ("content", "tool_calls") if n in choice}
        choice |= {"delta": delta} if is_chat else {"text": delta.get("content") or ""}
        return b"data: " + json.dumps({"id": "a", **head, "choices": [choice]}).encode() + b"\n\n"


class Client:
    """Asks whole or streamed, and gives the choices as of a whole reply, with all that was sent."""

    def __init__(self, url: str, streams: bool) -> None:
        self.url, self.streams = url, streams
        self.content = b""
        self.usage: Any = None

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        path = "chat/completions" if "messages" in body else "completions"
        body = {"model": "policy", **body, **({"stream": True} if self.streams else {})}
        reply = httpx2.post(f"{self.url}/{path}", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        self.content = reply.content
        if not self.streams:
            self.usage = reply.json()["usage"]
            return list(reply.json()["choices"])
        events = events_of(reply.content)
        assert events[-1] == b"data: [DONE]"
        self.usage = events[-2]["usage"]
        found: dict[int, dict[str, Any]] = {}
        for chunk in chunks_of(events):
            for choice in chunk["choices"]:
                one = found.setdefault(choice["index"], {"said": "", "calls": []})
                delta = choice.pop("delta", None) or {"content": choice.pop("text", None)}
                is_empty = list(delta.values()) == [None] and not choice["finish_reason"]
                assert not is_empty or "return_token_ids" in body
                one["said"] += delta.get("content") or ""
                one["calls"] += delta.get("tool_calls") or []
                one |= choice
        for one in found.values():
            calls = {"tool_calls": one["calls"]} if one["calls"] else {}
            one["message"] = {"role": "assistant", "content": one["said"] or None, **calls}
            one["text"] = one["said"]
        return [found[index] for index in sorted(found)]

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.choices(body)[0]


@contextmanager
def served(
    policy: Policy,
    streams: bool = False,
    inside: bool = False,
    scorer: Scorer | None = None,
    **bounds: Any,
) -> Iterator[Client]:
    registry = CollectorRegistry()
    service = service_of(scorer or scorer_with(by_turn(FITTED)), registry, bounds=Bounds(**bounds))
    if inside:
        with Served(ConfidenceMiddleware(policy.app, service)) as at:
            yield Client(at.url, streams)
        return
    with Served(policy.app) as behind, Served(proxy_app(behind.url, service, registry)) as at:
        yield Client(at.url, streams)


@pytest.mark.parametrize("inside", [False, True], ids=["proxied", "inside"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_two_turns_with_a_call_of_a_tool(inside: bool, streams: bool) -> None:
    policy = Policy()
    with served(policy, streams, inside) as client:
        messages: list[Any] = [QUESTION]
        first = client.choice({"messages": messages})
        assert first["message"]["tool_calls"]
        assert first["confidence"] == pytest.approx(0.25)
        assert first["confidence_raw"] == 0.25
        assert first["confidence_source"] == "logistic of turns"
        assert client.usage == USAGE
        messages += [first["message"], {"role": "tool", "content": "6"}]
        second = client.choice({"messages": messages})
        assert second["message"]["content"] == "It is \\boxed{6}."
        assert second["confidence_raw"] == 0.75
        assert second["confidence"] == pytest.approx(second_curve(0.75))
        for name in ("token_ids", "prompt_token_ids"):
            values = client.content.split(f'"{name}":'.encode())[1:]
            assert values
            assert all(value.startswith(b"null") for value in values), "the upstream's own word"
    line = "\n<conf> Confidence:"
    turns = policy.bodies("/v1/chat/completions")
    assert all("<conf>" not in json.dumps(body) for body in turns)
    branches = policy.bodies("/v1/completions")
    assert [text_of(body["prompt"]) for body in branches] == [
        f"user: 2*3=\n{CALL}{line}",
        f"user: 2*3=\nassistant: {CALL}\ntool: 6\nIt is \\boxed{{6}}.{line}",
    ]
    for body in branches:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("policy", 0.7, 16)
        assert "stream" not in body
    assert len(policy.bodies("/tokenize")) == 1, "the ids of a line are kept"


def test_every_choice_has_its_number() -> None:
    policy = Policy()
    policy.says = lambda _, index: f"Number {index}\n"
    policy.states = lambda text: f" 0.{text.partition('Number ')[2][0]}5"
    for streams in (False, True):
        with served(policy, streams) as client:
            choices = client.choices({"messages": [QUESTION], "n": 3})
        assert [one["confidence_raw"] for one in choices] == [0.05, 0.15, 0.25]
    texts = [text_of(body["prompt"]) for body in policy.bodies("/v1/completions")]
    assert all(text.endswith("\n<conf> Confidence:") and "\n\n" not in text for text in texts)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_asks_for_the_ids_gets_them(streams: bool) -> None:
    with served(Policy(), streams) as client:
        choice = client.choice({"messages": [QUESTION], "return_token_ids": True})
        assert choice["confidence"] == pytest.approx(0.25)
        assert json.dumps(ids_of("user: 2*3=\n"), separators=(",", ":")).encode() in client.content
        assert (choice["token_ids"] == [*ids_of(CALL), END]) is not streams


@pytest.mark.parametrize("streams", [False, True])
def test_an_upstream_without_ids(streams: bool) -> None:
    policy = Policy()
    policy.names_ids = False
    with served(policy, streams) as client:
        choice = client.choice({"messages": [QUESTION]})
        assert choice["message"]["tool_calls"]
        assert choice["confidence"] is None
        assert choice["confidence_reason"].startswith("no_token_ids:")
        policy.refuses_ids = True
        refused = client.choice({"messages": [QUESTION]})
        assert refused["message"]["tool_calls"]
        assert refused["confidence_reason"].startswith("no_token_ids:")
        assert "return_token_ids" not in policy.asked[-1][1]
        policy.says = lambda prompt, _: "6\n<conf> Confidence: 0.5"
        policy.refuses_ids = False
        assert client.choice({"messages": [QUESTION]})["confidence"] == pytest.approx(0.5)
    assert not policy.bodies("/v1/completions")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
def test_the_answer_survives_an_upstream_that_does_not_answer_for_the_number(
    path: str, streams: bool
) -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is 6."
    with served(policy, streams, body_seconds=1.0) as client:
        for name in ("fails", "hangs"):
            policy.fails = policy.hangs = ""
            setattr(policy, name, path)
            choice = client.choice({"messages": [QUESTION]})
            assert choice["message"]["content"] == "It is 6."
            assert choice["confidence"] is None
            assert choice["confidence_reason"].startswith("no_number:")
            assert client.usage == USAGE
        policy.fails = policy.hangs = ""
        assert client.choice({"messages": [QUESTION]})["confidence"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("stated", "word"),
    [
        (" much", "unparsable"),
        (" 1.5", "out_of_range"),
        (" 0.5 or so", "trailing_text"),
        (" 0.5 <conf> 0.6", "multiple"),
        (" 0.5", "truncated"),
    ],
)
def test_a_malformed_number(stated: str, word: str) -> None:
    policy = Policy()
    policy.states = lambda text: stated
    if word == "truncated":
        policy.number_reason = "length"
    with served(policy) as client:
        choice = client.choice({"messages": [QUESTION]})
    assert choice["confidence"] is None
    assert choice["confidence_reason"].startswith(f"{word}:")


def test_an_answer_that_states_a_confidence_is_not_asked() -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is \\boxed{6}\n<conf> Confidence: 0.6"
    answered = [QUESTION, {"role": "assistant", "content": "?"}, QUESTION]
    with served(policy) as client:
        choice = client.choice({"messages": answered})
    assert choice["message"]["content"] == "It is \\boxed{6}\n"
    assert choice["confidence"] == pytest.approx(second_curve(0.6))
    assert not policy.bodies("/v1/completions")


@pytest.mark.parametrize(("reason", "stop_reason"), [("length", None), ("stop", "]")])
def test_an_answer_that_no_token_ends(reason: str, stop_reason: str | None) -> None:
    """One that is cut, and one that is stopped at a text, are asked with all of their tokens."""
    policy = Policy()
    policy.says = lambda prompt, _: "[2*3]"
    policy.reason, policy.stop_reason = reason, stop_reason
    for streams in (False, True):
        with served(policy, streams) as client:
            assert client.choice({"messages": [QUESTION]})["confidence"] == pytest.approx(0.25)
    for body in policy.bodies("/v1/completions"):
        assert text_of(body["prompt"]).endswith("[2*3]\n<conf> Confidence:")


@pytest.mark.parametrize("reason", ["content_filter", "odd"])
def test_an_answer_that_is_not_whole_is_not_asked(reason: str) -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is"
    policy.reason = reason
    with served(policy) as client:
        choice = client.choice({"messages": [QUESTION]})
    assert choice["confidence"] is None
    assert choice["confidence_reason"].partition(":")[0] in ("filtered", "unfinished")
    assert not policy.bodies("/v1/completions")


def test_a_chat_with_an_image_is_not_asked() -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is 6."
    parts = [{"type": "text", "text": "2*3="}]
    with served(policy) as client:
        texts = client.choice({"messages": [{"role": "user", "content": parts}]})
        assert texts["confidence"] == pytest.approx(0.25)
        parts.append({"type": "image_url"})
        image = client.choice({"messages": [{"role": "user", "content": parts}]})
    assert image["confidence_reason"].startswith("no_token_ids:")
    assert len(policy.bodies("/v1/completions")) == 1


def test_no_number_behind_thinking_that_does_not_end() -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "<think>So"
    policy.reason = "length"
    with served(policy) as client:
        assert client.choice({"messages": [QUESTION]})["confidence"] is None
    assert not policy.bodies("/v1/completions")


@pytest.mark.parametrize("streams", [False, True])
def test_metadata_says_the_turn_of_a_text(streams: bool) -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is \\boxed{6}"
    fitted_on = replace(FITTED, templates=("chat", "raw"))
    with served(policy, streams, scorer=scorer_with(by_turn(fitted_on))) as client:
        body: dict[str, Any] = {"prompt": "2*3="}
        none = client.choice(body)
        assert none["confidence_reason"].startswith("no_turn:")
        for turn in ("0", "x", "9" * 5000):
            refused = client.choice({**body, "metadata": {"turn": turn}})
            assert refused["confidence_reason"].startswith("no_turn:")
        assert not policy.bodies("/detokenize")
        for turn in (1, "1", "2", "3"):
            choice = client.choice({**body, "metadata": {"turn": turn}})
            expected = 0.75 if str(turn) == "1" else second_curve(0.75)
            assert choice["confidence"] == pytest.approx(expected)
        assert choice["text"] == "It is \\boxed{6}"
        page = httpx2.get(client.url.removesuffix("/v1")).text
        assert '"column": "turn", "kinds": ["1", "2"]' in page, "which the page sends"
        chat = client.choice({"messages": [QUESTION], "metadata": {"turn": "2"}})
        assert chat["confidence"] == pytest.approx(second_curve(0.75))


def test_a_server_that_ends_in_the_middle_of_a_branch_has_sent_the_text() -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is 6."
    policy.hangs = "/v1/completions"
    app = ConfidenceMiddleware(
        policy.app, service_of(scorer_with(by_turn(FITTED)), CollectorRegistry())
    )
    body = {"model": "policy", "messages": [QUESTION], "stream": True}
    sent: list[Any] = []

    async def ended() -> None:
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": [(b"content-type", b"application/json")],
            "query_string": b"",
        }
        running = asyncio.create_task(app(scope, receive, send))
        while not policy.bodies("/v1/completions"):
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait((running,))

    asyncio.run(ended())
    events = events_of(b"".join(message.get("body", b"") for message in sent))
    choices = [chunk["choices"][0] for chunk in chunks_of(events) if chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "It is 6."
    assert choices[-1]["confidence"] is None
    assert events[-1] == b"data: [DONE]"
    assert "error" in events[-2]


def test_ids_of_a_line_that_are_none_are_not_kept() -> None:
    """Without them the policy would go on with its answer, and any number in it would count."""
    policy = Policy()
    policy.says = lambda prompt, _: "It is 6."
    odd: list[Any] = [None, "61", [], ["61"], [61.0]]
    tokenize = policy.tokenize
    policy.tokenize = lambda body: (  # type: ignore[method-assign]
        JSONResponse({"tokens": odd.pop()}) if odd else tokenize(body)
    )
    with served(policy) as client:
        while odd:
            choice = client.choice({"messages": [QUESTION]})
            assert choice["message"]["content"] == "It is 6."
            assert choice["confidence_reason"].startswith("no_number:")
        assert not policy.bodies("/v1/completions")
        assert client.choice({"messages": [QUESTION]})["confidence"] == pytest.approx(0.25)


@pytest.mark.parametrize("path", ["/detokenize", "/v1/completions"])
@pytest.mark.parametrize("text", [None, 0.75, [" 0.75"]])
def test_what_is_no_text_is_no_number(path: str, text: object) -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is 6."
    policy.states = lambda _: text  # type: ignore[assignment, return-value]
    if path == "/detokenize":
        policy.states = lambda _: " 0.75"
        policy.detokenize = lambda _: JSONResponse({"prompt": text})  # type: ignore[method-assign]
    with served(policy) as client:
        choice = client.choice({"messages": [QUESTION]})
    assert choice["message"]["content"] == "It is 6."
    assert choice["confidence_reason"].startswith("no_number:")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
def test_a_refusal_that_repeats_the_ids_is_not_shown(path: str, streams: bool) -> None:
    """As the errors of pydantic do, which name the input."""
    policy = Policy()
    policy.says = lambda prompt, _: "It is 6."
    policy.repeats = path
    with served(policy, streams) as client:
        choice = client.choice({"messages": [QUESTION]})
    assert choice["confidence_reason"].startswith("no_number:")
    assert "422" in choice["confidence_reason"]
    assert b"[" not in client.content.split(b"confidence_reason")[1].partition(b"}")[0]


@pytest.mark.parametrize("name", ["prompt_token_ids", "token_ids"])
def test_chunks_that_repeat_the_ids_of_the_prompt_or_lack_their_own(name: str) -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "It is 6."
    event = policy.event

    def changed(choice: dict[str, Any], head: dict[str, Any], is_chat: bool) -> bytes:
        if name == "prompt_token_ids":
            choice[name] = ids_of("user: 2*3=\n")
        elif choice.get("content") == "is ":
            choice[name] = None
        return event(choice, head, is_chat)

    policy.event = changed  # type: ignore[method-assign]
    with served(policy, streams=True) as client:
        choice = client.choice({"messages": [QUESTION]})
    assert choice["said"] == "It is 6."
    branches = policy.bodies("/v1/completions")
    if name == "token_ids":
        assert choice["confidence_reason"].startswith("no_token_ids:")
        assert not branches
        return
    assert choice["confidence"] == pytest.approx(0.25)
    assert text_of(branches[0]["prompt"]) == "user: 2*3=\nIt is 6.\n<conf> Confidence:"


def test_a_branch_has_the_clients_headers_but_those_that_name_its_request() -> None:
    policy = Policy()
    named = {"authorization": "Bearer x", "x-request-id": "r", "idempotency-key": "i"}
    with served(policy) as client:
        body = {"model": "policy", "messages": [QUESTION]}
        reply = httpx2.post(f"{client.url}/chat/completions", json=body, headers=named)
    assert reply.json()["choices"][0]["confidence"] == pytest.approx(0.25)
    (first, *others) = policy.headers
    assert named.items() <= first.items()
    assert len(others) == 4
    for headers in others:
        assert headers["authorization"] == "Bearer x"
        assert not {"x-request-id", "idempotency-key"} & headers.keys()


def test_an_answer_that_the_client_has_begun_is_the_turn_it_is_at() -> None:
    policy = Policy()
    policy.says = lambda prompt, _: "\\boxed{6}."
    begun = [QUESTION, {"role": "assistant", "content": "It is "}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    with served(policy) as client:
        first = client.choice({"messages": begun, **goes_on})
        assert first["confidence"] == pytest.approx(0.75)
        second = client.choice({"messages": [*begun, QUESTION], **goes_on})
        assert second["confidence"] == pytest.approx(second_curve(0.75))
        assert client.choice({"messages": begun})["confidence"] == second["confidence"]
