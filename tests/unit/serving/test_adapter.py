"""An adapter that the upstream serves is asked what it states behind an answer: exactly the mean
over all numbers, whatever the tokens.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.serving.adapter import TEXTS, AdapterReader
from megatron_dcpo.serving.scorer import Scorer
from tests.helpers.serving import CHAT, COMPLETION, proxied
from tests.helpers.upstream import ANSWER, Served, Upstream, chunks_of, events_of

SHOWN = ANSWER.partition("<conf>")[0]
BEHIND = SHOWN.rstrip() + "\n<conf> Confidence: "
WEIGHTS = np.random.default_rng(0).dirichlet(np.full(101, 0.05))
EXPECTED = float(WEIGHTS @ (np.arange(101) / 100))


class WithAdapter(Upstream):
    """``width``: the most characters of a token. ``mass``: the probability of all numbers."""

    def __init__(self, width: int, mass: float = 1.0, tops: int = 200) -> None:
        super().__init__()
        self.width, self.mass, self.tops = width, mass, tops
        self.read: list[dict[str, Any]] = []

    async def models(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        rows = [{"id": "policy"}, {"id": "sure", "parent": "policy"}]
        return JSONResponse({"data": rows})

    async def complete(self, request: Any) -> Any:
        from starlette.responses import JSONResponse, Response

        body = json.loads(await request.body())
        if body.get("model") != "sure":
            return await super().complete(request)
        self.read.append(body)
        is_chat = "messages" in body
        text = body["messages"][-1]["content"] if is_chat else body["prompt"]
        rows = self.next_tokens(text.rpartition("Confidence: ")[2])
        if is_chat:
            tops = [{"token": t, "logprob": value} for t, value in rows.items()]
            content = [{"token": "x", "logprob": 0.0, "top_logprobs": tops}]
            return JSONResponse({"choices": [{"logprobs": {"content": content}}]})
        content = json.dumps({"choices": [{"logprobs": {"top_logprobs": [rows]}}]})
        return Response(content)  # with NaN

    def next_tokens(self, begun: str) -> dict[str, float]:
        """Tokens cut the numbers into pieces of ``width`` characters."""
        shares: dict[str, float] = {}
        whole = 0.0
        for text, weight in zip(TEXTS, WEIGHTS, strict=True):
            if text.startswith(begun):
                token = text[len(begun) : len(begun) + self.width]
                shares[token] = shares.get(token, 0.0) + weight
                whole += weight
        scale = (self.mass if not begun else 1.0) / whole
        found = {t: math.log(s * scale) for t, s in shares.items() if s > 0}
        return {"very": math.log(1 - self.mass + 1e-9), **found}


def reader() -> AdapterReader:
    return AdapterReader("sure", "policy", "<conf>")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("body", [CHAT, COMPLETION], ids=["chat", "completions"])
def test_the_mean_over_all_numbers_is_read(body: dict[str, Any], width: int) -> None:
    with proxied(Scorer(), WithAdapter(width, mass=0.9), reader=reader()) as proxy:
        choice = proxy.choice(body)
        assert choice["confidence"] == pytest.approx(EXPECTED, abs=2e-3)
        assert choice["confidence_raw"] == 0.83
        assert choice["confidence_source"] == "adapter sure"
        assert choice["confidence_reason"] is None
        upstream: Any = proxy.upstream
        asked = upstream.read[0]
        assert asked["max_tokens"] == 1
        if body is CHAT:
            assert asked["continue_final_message"] is True
            assert asked["messages"][:-1] == CHAT["messages"]
            assert asked["messages"][-1]["content"] == BEHIND
            assert choice["message"]["content"] == SHOWN
        else:
            assert asked["prompt"] == COMPLETION["prompt"] + BEHIND
        last = chunks_of(events_of(proxy.post({**body, "stream": True}).content))[-1]
        assert last["choices"][0]["confidence"] == choice["confidence"]


def test_what_the_adapter_cannot_say_is_null() -> None:
    with proxied(Scorer(), WithAdapter(1, mass=0.3), reader=reader()) as proxy:
        choice = proxy.choice(CHAT)
        assert choice["confidence"] is None
        assert choice["confidence_reason"].startswith("adapter:")
        ids = proxy.choice({**COMPLETION, "prompt": [1, 2]})
        assert "token ids" in ids["confidence_reason"]
        other = proxy.choice({**CHAT, "model": "other"})
        assert other["confidence_reason"].startswith("mismatch:")
        proxy.upstream.finish_reason = "length"
        assert proxy.choice(CHAT)["confidence_reason"].startswith("truncated:")
    with proxied(Scorer(), reader=reader()) as proxy:
        proxy.upstream.logs = False
        choice = proxy.choice(CHAT)
        assert choice["confidence"] is None
        assert "log-probs" in choice["confidence_reason"]


def test_each_prompt_of_several_is_its_own() -> None:
    with proxied(Scorer(), WithAdapter(4), reader=reader()) as proxy:
        body = {**COMPLETION, "prompt": ["first", "second"], "n": 1}
        upstream: Any = proxy.upstream
        proxy.upstream.says = lambda body, index: ANSWER
        proxy.choice(body)
        assert upstream.read[0]["prompt"].startswith("first")


@pytest.mark.parametrize("count", ["2", "x", 0.5, -1, [1], {"a": 1}, True])
def test_a_number_of_answers_of_any_type_is_passed_on(count: Any) -> None:
    with proxied(Scorer(), WithAdapter(4), reader=reader()) as proxy:
        proxy.upstream.choice = lambda body, index, chat: {  # type: ignore[method-assign]
            "index": 7,
            "text": ANSWER,
            "finish_reason": "stop",
        }
        proxy.upstream.error = None
        body = {**COMPLETION, "prompt": ["first", "second"], "n": 1}
        choices = proxy.post(body).json()["choices"]
        assert choices[0]["confidence"] is None
        assert choices[0]["confidence_reason"].startswith("adapter:")
        proxy.upstream.error = (422, {"error": "n"})
        assert proxy.post({**body, "n": count}).status_code == 422


@pytest.mark.parametrize("value", [math.nan, "x", None])
def test_log_probs_that_are_no_numbers_give_no_confidence(value: Any) -> None:
    upstream = WithAdapter(4)
    upstream.next_tokens = lambda begun: {"0.50": value, "1.00": -0.1}  # type: ignore[method-assign]
    with proxied(Scorer(), upstream, reader=reader()) as proxy:
        choice = proxy.choice(COMPLETION)
        assert choice["confidence"] is None
        assert choice["confidence_reason"].startswith("adapter:")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--adapter", "none"], "policy, sure"),
        (["--adapter", "sure", "--calibrator", "c.npz"], "--calibrator"),
        (["--adapter", "sure", "--abstain-above", "0.1"], "--abstain-above"),
    ],
)
def test_an_adapter_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    with Served(WithAdapter(1).app) as served:
        assert main(["serve", "--endpoint", served.url, *options]) == 2
    assert named in capsys.readouterr().err
