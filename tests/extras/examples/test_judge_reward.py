"""``examples/judge_reward``: a judge model's probability of Yes as reward, its errors counted."""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.config import JudgingConfig
from megatron_dcpo.judging.answers import Attempt
from megatron_dcpo.judging.endpoint import EndpointVerifier
from tests.helpers.paths import EXAMPLES

FILE = EXAMPLES / "judge_reward" / "server.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("judge_reward_server", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Model(BaseHTTPRequestHandler):
    """A judge that says Yes where the answer to be judged holds the reference, and odd things."""

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        asked = json.loads(self.rfile.read(length))["messages"][0]["content"]
        reference = asked.split("Reference answer:\n")[1].split("\n")[0]
        judged = asked.split("Answer to be judged:\n")[1]
        if "broken" in judged:
            self.send_error(500)
            return
        yes = 0.9 if reference in judged else 0.2
        top = [
            {"token": "Yes", "logprob": math.log(yes * 0.8)},
            {"token": " no", "logprob": math.log((1 - yes) * 0.8)},
            {"token": "Hm", "logprob": math.log(0.2)},
        ]
        logprobs: Any = {"content": [{"token": "Yes", "top_logprobs": top}]}
        text = "Yes"
        if "plain" in judged:
            logprobs, text = None, "No."
        if "talks" in judged:
            logprobs, text = None, "Well,"
        choice = {"message": {"content": text}, "logprobs": logprobs}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def served(handler: type[BaseHTTPRequestHandler]) -> tuple[ThreadingHTTPServer, str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def judge() -> Iterator[Any]:
    server, url = served(Model)
    yield example().Judge(f"{url}/v1", "judge", timeout=10.0)
    server.shutdown()


def test_a_verdict_is_the_share_of_yes(judge: Any) -> None:
    item = {"problem": "2*3=", "answer": "6", "response": "it is 6"}
    assert judge.verdict(item)["score"] == pytest.approx(0.9)
    assert judge.verdict(item | {"response": "it is 7"})["score"] == pytest.approx(0.2)
    assert judge.verdict(item | {"response": "plain"})["score"] == 0.0
    assert "Well" in judge.verdict(item | {"response": "talks"})["error"]
    assert "500" in judge.verdict(item | {"response": "broken"})["error"]


def test_the_trainer_asks_it(judge: Any) -> None:
    with ThreadPoolExecutor(2) as pool:
        server, url = served(example().handler_of(judge, pool))
        verifier = EndpointVerifier(url, JudgingConfig(graded=True))
        outcomes = verifier(
            [
                Attempt(None, truth="6", reasoning=text, row={"problem": "2*3="})
                for text in ("it is 6", "it is 7", "broken")
            ]
        )
        server.shutdown()
    assert outcomes[0].score == pytest.approx(0.9)
    assert outcomes[1].score == pytest.approx(0.2)
    assert outcomes[2] is None


@pytest.mark.parametrize(
    "reply",
    [
        [],
        {"choices": []},
        {"choices": [{"message": {"content": 5}}]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"content": "Yes"}, "logprobs": [1]}]},
        {"choices": [{"message": {"content": "Yes"}, "logprobs": {"content": [None]}}]},
        *(
            {
                "choices": [
                    {
                        "message": {"content": "Yes"},
                        "logprobs": {
                            "content": [{"top_logprobs": [{"token": "Yes", "logprob": odd}]}]
                        },
                    }
                ]
            }
            for odd in (1e6, math.nan, None, "big")
        ),
    ],
)
def test_a_reply_that_cannot_be_read_is_an_error(
    judge: Any, monkeypatch: pytest.MonkeyPatch, reply: Any
) -> None:
    monkeypatch.setattr(type(judge), "_post", lambda *_: reply)
    verdict = judge.verdict({"problem": "2*3=", "answer": "6", "response": "6"})
    assert verdict.keys() == {"error"}


def test_a_reply_without_end_is_an_error(judge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    item = {"problem": "2*3=", "answer": "6", "response": "it is 6"}
    monkeypatch.setitem(type(judge)._post.__globals__, "MOST_REPLY_BYTES", 10)
    assert "error" in judge.verdict(item)


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, b"nonsense", 400),
        ({}, b"[]", 400),
        ({}, b'{"items": 5}', 400),
        ({"Content-Length": "-1"}, b"", 411),
        ({"Content-Length": "999999999999"}, b"", 413),
    ],
)
def test_what_is_no_request_is_refused(
    judge: Any, headers: dict[str, str], body: bytes, status: int
) -> None:
    with ThreadPoolExecutor(2) as pool:
        server, url = served(example().handler_of(judge, pool))
        connection = HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.putrequest("POST", "/")
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        assert connection.getresponse().status == status
        server.shutdown()


def test_an_item_that_lacks_something_is_an_error_of_its_own(judge: Any) -> None:
    assert "answer" in judge.verdict({"problem": "2*3=", "response": "6"})["error"]
    assert "error" in judge.verdict(7)


def test_its_calibration_is_measured(
    judge: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for index, (text, correct) in enumerate((("6", 1.0), ("7", 0.0), ("6", 0.0), ("broken", 1.0))):
        rows.append(
            {
                "version": 2,
                "prompt_id": str(index),
                "ground_truth": "6",
                "task": "t",
                "problem": "2*3=",
                "sample_index": 0,
                "finish_reason": "stop",
                "weights_version": 0,
                "text": f"{text}\n<conf> Confidence: 0.5",
                "correct": correct,
                "confidence": 0.5,
                "status": "ok",
                "boundary": None,
                "length": 0,
            }
        )
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    example().measure(judge, str(path))
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["errors"] == "1 of 4"
    assert lines["agrees"] == "2 of 3"
    assert float(lines["Brier"]) == pytest.approx((0.1**2 + 0.2**2 + 0.9**2) / 3, abs=1e-3)
