"""The endpoint engine against a small server of our own: concurrency, retries, refusals, kill and
resume.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.calibration import diagrams
from megatron_dcpo.cli import main
from megatron_dcpo.errors import UserError
from megatron_dcpo.evaluation.evaluate import Request
from megatron_dcpo.evaluation.samples import read_samples
from megatron_dcpo.judging.replies import response_of_choice
from megatron_dcpo.judging.thinking import KNOWN
from megatron_dcpo.judging.token_bytes import TokenBytes
from megatron_dcpo.rollout.openai_client import Endpoint
from megatron_dcpo.rollout.sampling import SamplingConfig, sample_seed
from megatron_dcpo.runtime.served_models import check_address, served_model
from megatron_dcpo.types import Prompt, Response
from tests.helpers import pictures
from tests.helpers.fake_server import FakeServer, Reply, good_reply
from tests.helpers.judging import judge_many


@pytest.fixture(autouse=True)
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in pictures.NONE.items():
        monkeypatch.setattr(diagrams, name, function)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer().start()
    yield fake
    fake.stop()


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"p{i}", ({"role": "user", "content": f"what is {i} = ?"},), (), str(i), "toy")
        for i in range(count)
    ]


def endpoint(server: FakeServer, **options: Any) -> Endpoint:
    sampling = SamplingConfig(temperature=0.7, top_p=0.8, top_k=20, max_tokens=9, top_logprobs=3)
    return Endpoint(
        server.url, "fake", sampling, **{"first_pause": 0.01, "timeout": 5.0, **options}
    )


def all_of(found: Iterator[list[Response]]) -> dict[tuple[str, int], Response]:
    flat = [completion for batch in found for completion in batch]
    assert len({(c.prompt_id, c.sample_index) for c in flat}) == len(flat)
    return {(c.prompt_id, c.sample_index): c for c in flat}


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_every_sample_once_and_side_by_side(server: FakeServer, api: Any) -> None:
    server.pause = 0.05
    engine = endpoint(server, api=api, concurrency=6, extra_body={"min_p": 0.1}, api_key="secret")
    found = all_of(engine.complete([Request(p, (0, 1, 2)) for p in prompts(8)]))
    assert set(found) == {(f"p{i}", r) for i in range(8) for r in range(3)}
    assert 2 <= server.most_at_once <= 6
    assert len({body["seed"] for body in server.asked}) == len(server.asked) == 24
    body = server.asked[0]
    assert (
        body["model"],
        body["temperature"],
        body["top_p"],
        body["top_k"],
        body["max_tokens"],
        body["min_p"],
    ) == ("fake", 0.7, 0.8, 20, 9, 0.1)
    assert body["authorization"] == "Bearer secret"
    one = found["p3", 1]
    np.testing.assert_array_equal(one.logprobs, np.array([-0.5, -0.25, -9999.0], np.float32))
    assert one.top_logprobs is not None
    np.testing.assert_array_equal(
        one.top_logprobs, np.array([[-0.5, -1.5], [-0.25, -2.0], [-0.1, -3.0]], np.float32)
    )
    again = all_of(
        endpoint(server, api=api, concurrency=1).complete(
            [Request(p, (0, 1, 2)) for p in prompts(8)]
        )
    )
    assert {key: c.text for key, c in again.items()} == {key: c.text for key, c in found.items()}


@pytest.mark.parametrize("end", [[], ["<|end|>"]])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_where_the_tokens_end(server: FakeServer, api: Any, end: list[str]) -> None:
    """By their bytes, or their text; unknown where the tokens do not make up the text. An end token
    may follow it.
    """
    tokens = ["\\boxed{5}", " é", "\n<conf> Confidence: ", "0.8", *end]

    def reply(changed: str) -> Callable[[dict[str, Any]], Reply]:
        def say(body: dict[str, Any]) -> Reply:
            text = "".join(tokens[:4]) + changed
            if "messages" in body:
                rows: list[dict[str, Any]] = [{"token": token, "logprob": -0.5} for token in tokens]
                rows[1] |= {"token": "?", "bytes": list(" é".encode())}
                choice: dict[str, Any] = {
                    "message": {"content": text},
                    "logprobs": {"content": rows},
                }
            else:
                choice = {
                    "text": text,
                    "logprobs": {"token_logprobs": [-0.5] * len(tokens), "tokens": tokens},
                }
            return 200, {"choices": [choice | {"finish_reason": "stop"}]}, {}

        return say

    for changed, known in (("", True), ("9", False)):
        server.reply = reply(changed)
        (one,) = all_of(endpoint(server, api=api).complete([Request(prompts(1)[0], (0,))])).values()
        if not known:
            assert one.token_ends is None
            continue
        assert one.token_ends is not None
        assert one.token_ends[:4].tolist() == [9, 12, 32, 35]
        (judged,) = judge_many([one], {"p0": prompts(1)[0]})
        assert (judged.boundary, judged.length) == (3, len(tokens)), (
            "the third token begins before the marker"
        )


def test_passing_failures_are_repeated(server: FakeServer) -> None:
    seen: Counter[int] = Counter()

    def sometimes(body: dict[str, Any]) -> Reply:
        seen[body["seed"]] += 1
        if seen[body["seed"]] <= 2:
            return (429, {}, {"Retry-After": "0"}) if seen[body["seed"]] == 1 else (503, {}, {})
        return good_reply(body)

    server.reply = sometimes
    found = all_of(endpoint(server).complete([Request(p, (0,)) for p in prompts(4)]))
    assert len(found) == 4
    assert set(seen.values()) == {3}


def test_refusals_are_errors_at_once_and_keep_what_is_finished(server: FakeServer) -> None:
    server.reply = lambda body: (
        (400, {"error": "no such model"}, {}) if len(server.asked) > 3 else good_reply(body)
    )
    found = endpoint(server, concurrency=1).complete([Request(p, (0,)) for p in prompts(9)])
    kept: list[Response] = []
    with pytest.raises(UserError, match=r"HTTP 400.*no such model"):
        kept.extend(completion for batch in found for completion in batch)
    assert len(kept) == 3
    assert len(server.asked) == 4


def test_a_server_that_is_gone_is_an_error_after_all_attempts(server: FakeServer) -> None:
    server.stop()
    with pytest.raises(UserError, match="no answer after 3 attempts"):
        all_of(endpoint(server, attempts=3).complete([Request(prompts(1)[0], (0,))]))
    with pytest.raises(UserError, match="no server accepts connections there"):
        served_model(server.url)


ERRORS_OF_200 = [
    {"error": {"message": "upstream overloaded", "code": 502}},
    {"error": "overloaded"},
    {"id": "x", "choices": []},
    {"id": "x", "choices": None},
    {},
    {"choices": [{"error": {"code": 502}, "finish_reason": "error", "message": {}}]},
]


@pytest.mark.parametrize("bad", ERRORS_OF_200)
def test_errors_under_the_status_200_are_repeated(server: FakeServer, bad: dict[str, Any]) -> None:
    server.reply = lambda body: (200, bad, {}) if len(server.asked) <= 2 else good_reply(body)
    assert len(all_of(endpoint(server).complete([Request(prompts(1)[0], (0,))]))) == 1
    assert len(server.asked) == 3
    server.reply = lambda body: (200, bad, {})
    with pytest.raises(UserError, match="no answer after 3 attempts"):
        endpoint(server, attempts=3).ask(prompts(1)[0], 0)


def test_a_lasting_error_under_the_status_200_is_an_error_at_once(server: FakeServer) -> None:
    bad = {"error": {"message": "no such key", "code": 401}}
    server.reply = lambda body: (200, bad, {})
    with pytest.raises(UserError, match="no such key"):
        endpoint(server).ask(prompts(1)[0], 0)
    assert len(server.asked) == 1


def test_no_error_under_the_status_200_shows_the_key(server: FakeServer) -> None:
    for code in (401, 502):
        error = {"message": "w" * 440 + " the key s3cret-key is unknown", "code": code}
        server.reply = lambda body, error=error: (200, {"error": error}, {})
        with pytest.raises(UserError) as caught:
            endpoint(server, api_key="s3cret-key", attempts=1).ask(prompts(1)[0], 0)
        assert "s3cret" not in str(caught.value)


# what servers say of one prompt: vLLM, SGLang, TGI, llama.cpp, Anthropic, OpenAI, Azure, DeepSeek
REFUSED_PROMPTS = [
    (
        400,
        {
            "message": "This model's maximum context length is 4096 tokens. However, you "
            "requested 9000 tokens",
            "code": 400,
        },
    ),
    (400, {"message": "The input (9000 tokens) is longer than the model's context"}),
    (
        422,
        {
            "error": "Input validation error: `inputs` must have less than 4096 tokens",
            "error_type": "validation",
        },
    ),
    (400, {"error": {"message": "the request exceeds the available context size"}}),
    (400, {"error": {"message": "prompt is too long: 200001 tokens > 199999 maximum"}}),
    (400, {"error": {"code": "context_length_exceeded", "message": "Please reduce"}}),
    (413, {}),
    (400, {"error": {"code": "content_filter", "message": "The response was filtered"}}),
    (403, {"error": {"message": "your request was flagged by moderation"}}),
    (400, {"error": {"message": "Content Exists Risk"}}),
    (200, {"error": {"code": 400, "message": "maximum context length is 4096"}}),
]


@pytest.mark.parametrize(("status", "body"), REFUSED_PROMPTS)
def test_a_prompt_that_is_refused_is_an_empty_response(
    server: FakeServer, status: int, body: dict[str, Any]
) -> None:
    server.reply = lambda _: (status, body, {})
    response = endpoint(server).ask(prompts(1)[0], 0)
    assert (response.text, len(response.logprobs)) == ("", 0)
    assert response.refusal is not None
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"error": "no such model"}),
        (401, {"error": "content of the key is wrong"}),
        (404, {"error": "context_length_exceeded"}),
        (400, {"error": {"message": "Unsupported parameter: 'max_tokens'"}}),
    ],
)
def test_other_refusals_are_errors(server: FakeServer, status: int, body: dict[str, Any]) -> None:
    server.reply = lambda _: (status, body, {})
    with pytest.raises(UserError, match=f"HTTP {status}"):
        endpoint(server).ask(prompts(1)[0], 0)


def test_wrong_addresses_are_said_by_name(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("/chat/completions", "/completions", "/models/"):
        with pytest.raises(UserError, match="address of a request") as caught:
            check_address(server.url + path)
        assert f"--endpoint {server.url}" in str(caught.value)
    check_address(server.url)
    server.models_below = "/v1"
    with pytest.raises(UserError) as caught:
        served_model(server.url.removesuffix("/v1"))
    assert f"--endpoint {server.url}" in str(caught.value)
    server.reply = lambda _: (404, {}, {})
    with pytest.raises(UserError, match=r"--endpoint .*/v1"):
        Endpoint(server.url.removesuffix("/v1"), "fake", SamplingConfig(max_tokens=9)).ask(
            prompts(1)[0], 0
        )


def _choice(content: Any = "text", logprobs: Any = None) -> dict[str, Any]:
    return {"choices": [{"message": {"content": content}, "logprobs": {"content": logprobs}}]}


ODD_REPLIES = [
    [],
    {"choices": {"a": 1}},
    {"choices": [[]]},
    {"choices": [{"message": "text"}]},
    {"choices": [{"message": {}, "logprobs": {"content": [1]}}]},
    _choice(["not", "text"]),
    _choice({"text": 1}),
    _choice(logprobs=[{"logprob": "low"}]),
    _choice(logprobs=[{"logprob": [-1, -2]}, {"logprob": [-1, -2]}]),
    _choice(logprobs=[{"logprob": 1000}]),
    _choice(logprobs=[{"logprob": float("nan")}]),
    _choice(logprobs=[{"logprob": 10**400}]),
    _choice(logprobs=[{"logprob": -1, "top_logprobs": [{"logprob": 5}]}]),
    _choice(logprobs=[{"logprob": -1, "top_logprobs": {"a": 1}}]),
    _choice(logprobs=[{"logprob": -1, "top_logprobs": [{"logprob": None}, {"logprob": -1}]}]),
]


@pytest.mark.parametrize("reply", ODD_REPLIES)
def test_odd_replies_are_named(server: FakeServer, reply: dict[str, Any]) -> None:
    server.reply = lambda body: (200, reply, {})
    with pytest.raises(UserError, match="unexpected reply"):
        all_of(endpoint(server).complete([Request(prompts(1)[0], (0,))]))


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize(
    ("reason", "finish_reason"),
    [
        ("stop", "stop"),
        ("STOP", "stop"),
        ("eos_token", "stop"),
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("length", "length"),
        ("max_tokens", "length"),
        ("content_filter", "length"),
        ("model_length", "length"),
        ("abort", "length"),
        ("tool_calls", "length"),
        ("a reason of next year", "length"),
        ("", "length"),
        (None, "length"),
        ({"type": "stop"}, "length"),
    ],
)
def test_a_response_is_finished_if_its_reason_is_known_to_say_so(
    reason: object, finish_reason: str, api: str
) -> None:
    text = "So \\boxed{12}.\n<conf> Confidence: 0.8"
    choice = {"message": {"content": text}, "text": text, "finish_reason": reason}
    response = response_of_choice("p0", 0, choice, api)
    assert response.finish_reason == finish_reason
    (judged,) = judge_many([response], {"p0": prompts(1)[0]})
    status = "ok" if finish_reason == "stop" else "truncated"
    assert judged.status == status


def test_a_response_without_a_reason_is_not_finished() -> None:
    response = response_of_choice("p0", 0, {"message": {"content": "x"}}, "chat")
    assert response.finish_reason == "length"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_a_reasoning_parser_took_out_is_put_back(server: FakeServer, field: str) -> None:
    """The answer is read behind it; without an answer the thinking has not ended."""
    answers: list[tuple[str | None, str, float | None]] = [
        ("\\boxed{0}\n<conf> 0.8", "ok", 0.8),
        (None, "missing", None),
        ("", "missing", None),
    ]
    for content, status, confidence in answers:
        message = {"content": content, field: "try \\boxed{1} <conf> 0.1"}
        choice = {"message": message, "finish_reason": "stop", "logprobs": None}
        server.reply = lambda body, choice=choice: (200, {"choices": [choice]}, {})  # type: ignore[misc]
        (one,) = all_of(endpoint(server).complete([Request(prompts(1)[0], (0,))])).values()
        end = "</think>" + content if content else ""
        assert one.text == f"<think>try \\boxed{{1}} <conf> 0.1{end}"
        (judged,) = judge_many([one], {"p0": prompts(1)[0]}, TokenBytes((), KNOWN[0]))
        assert (judged.status, judged.confidence, judged.answered) == (
            status,
            confidence,
            bool(content),
        )


def test_thinking_on_of_a_server_needs_the_tokenizer(
    server: FakeServer, toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(server, toy, tmp_path / "out", "--thinking", "on")) == 2
    assert "--tokenizer DIR" in capsys.readouterr().err
    assert not server.asked


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def toy(tmp_path: Path) -> str:
    path = tmp_path / "toy.jsonl"
    path.write_text(
        "\n".join(json.dumps({"problem": f"what is {i} = ?", "answer": str(i)}) for i in range(12))
    )
    return f"toy={path}"


def command(server: FakeServer, toy: str, out: Path, *more: str) -> list[str]:
    fixed = [
        "--template",
        "raw",
        "--repeats",
        "4",
        "--resamples",
        "20",
        "--timeout",
        "5",
        "--concurrency",
        "3",
    ]
    return [
        "evaluate",
        "--endpoint",
        server.url,
        "--benchmarks",
        toy,
        "--out",
        str(out),
        *fixed,
        *more,
    ]


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_killed_and_started_again_loses_no_sample_and_asks_none_twice(
    tmp_path: Path, toy: str
) -> None:
    """SIGKILL of the client in the middle, and another server on the same port afterwards."""
    server, out = FakeServer(pause=0.1).start(), tmp_path / "run"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    client = subprocess.Popen(
        [sys.executable, "-m", "megatron_dcpo", *command(server, toy, out)], env=environment
    )
    deadline = time.monotonic() + 90
    while lines_of(out / "samples.jsonl") < 12 and time.monotonic() < deadline:
        time.sleep(0.02)
    client.send_signal(signal.SIGKILL)
    client.wait()
    time.sleep(0.3)
    server.stop()
    kept = lines_of(out / "samples.jsonl")
    assert 12 <= kept < 48
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()[:kept]]
    recorded = {sample_seed(0, row["prompt_id"], row["sample_index"]) for row in rows}
    assert recorded <= {body["seed"] for body in server.answered}
    with open(out / "samples.jsonl", "a") as file:
        file.write('{"benchmark": "toy", "prom')  # as a power cut leaves it

    second = FakeServer(port=server.port).start()
    try:
        assert main(command(second, toy, out)) == 0
        assert len(second.asked) == 48 - kept
        assert recorded.isdisjoint(body["seed"] for body in second.asked)
        samples = read_samples(out / "samples.jsonl")
        assert [(s.prompt.prompt_id, s.response.sample_index) for s in samples] == [
            (f"toy/{i}", r) for i in range(12) for r in range(4)
        ]

        whole = tmp_path / "whole"
        assert main(command(second, toy, whole, "--concurrency", "7")) == 0
        for name in ("evaluation.json", "samples.jsonl"):
            assert (whole / name).read_text() == (out / name).read_text(), name
        before = len(second.asked)
        assert main(command(second, toy, out)) == 0
        assert len(second.asked) == before  # nothing is left to ask
        assert main(command(second, toy, out, "--repeats", "5")) == 0
        assert len(second.asked) == before + 12
    finally:
        second.stop()


def test_other_settings_are_refused(
    server: FakeServer, toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(server, toy, tmp_path / "run", "--limit", "2")) == 0
    assert main(command(server, toy, tmp_path / "run", "--limit", "2", "--temperature", "1")) == 2
    assert "was begun with temperature = 0.7, now it is 1.0" in capsys.readouterr().err
    assert (
        main(
            command(server, toy, tmp_path / "run", "--limit", "2", "--temperature", "1", "--fresh")
        )
        == 0
    )
    assert len(server.asked) == 16


def test_chat_messages_carry_the_training_prompt(
    server: FakeServer, toy: str, tmp_path: Path
) -> None:
    assert main(command(server, toy, tmp_path / "run", "--limit", "1", "--template", "paper")) == 0
    content = server.asked[0]["messages"][-1]["content"]
    assert content.startswith("what is 0 = ?")
    assert "<conf> Confidence: 0.83" in content
    assert "prompt" not in server.asked[0]


def test_a_lone_surrogate_is_saved_as_a_replacement_and_the_evaluation_goes_on(
    server: FakeServer, toy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        status, good, headers = good_reply(body)
        good["choices"][0]["text"] = "\ud800 \udfff \x1b[31m \\boxed{\ud800}\n<conf> 0.5"
        return status, good, headers

    server.reply = reply
    assert main(command(server, toy, tmp_path / "run", "--limit", "2")) == 0
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert {row["text"] for row in rows} == {"\ufffd \ufffd \x1b[31m \\boxed{\ufffd}\n<conf> 0.5"}
    assert {row["answer"] for row in rows} == {"\ufffd"}
    assert "\x1b" not in capsys.readouterr().out
    assert main(["report", str(tmp_path / "run")]) == 0


def test_a_redirecting_server_is_one_line(server: FakeServer, toy: str, tmp_path: Path) -> None:
    other = FakeServer().start()
    try:
        server.reply = lambda body: (307, {}, {"Location": f"{other.url}/completions"})
        with pytest.raises(
            UserError, match=r"/completions redirects to http.*redirects are not followed"
        ) as caught:
            all_of(endpoint(server).complete([Request(prompts(1)[0], (0,))]))
        assert "secret" not in str(caught.value)
        assert not other.asked
    finally:
        other.stop()
