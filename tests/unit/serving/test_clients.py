"""Clients that know nothing of the proxy work through it: the openai package, and ``dcpo evaluate
--endpoint``, whose ``dcpo calibrate`` and ``--calibrator`` agree with what is served.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_dcpo.cli import main
from megatron_dcpo.evaluation.posthoc_predictors import Posthoc
from megatron_dcpo.evaluation.samples import read_samples
from megatron_dcpo.serving.calibrator import load_calibrator
from megatron_dcpo.serving.scorer import Scorer
from tests.helpers.serving import CHAT, QUESTION, Proxied, logistic, proxied, scorer_with
from tests.helpers.upstream import ANSWER, Served, Upstream

SHOWN = ANSWER.partition("<conf>")[0]
MESSAGES: Any = CHAT["messages"]


@pytest.fixture
def proxy() -> Iterator[Proxied]:
    with proxied(scorer_with(logistic())) as one:
        yield one


@pytest.fixture
def client(proxy: Proxied) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=proxy.at.url, api_key="abc", max_retries=0)


def test_openai_plain_and_several_choices(client: Any) -> None:
    reply = client.chat.completions.create(model="policy", messages=MESSAGES, n=3)
    assert [choice.message.content for choice in reply.choices] == [SHOWN] * 3
    for choice in reply.choices:
        assert 0 < choice.confidence < 1
        assert choice.confidence_raw == 0.83
        assert choice.logprobs is None
    reply = client.completions.create(model="policy", prompt=QUESTION)
    assert reply.choices[0].text == SHOWN
    assert reply.choices[0].confidence is not None


def test_openai_streams(client: Any) -> None:
    text = ""
    confidences = []
    stream = client.chat.completions.create(model="policy", messages=MESSAGES, stream=True)
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        confidences.append(getattr(choice, "confidence", None))
    assert text == SHOWN
    assert confidences[-1] is not None
    assert set(confidences[:-1]) == {None}


def test_openai_asks_for_log_probs_itself(client: Any) -> None:
    reply = client.chat.completions.create(
        model="policy", messages=MESSAGES, logprobs=True, top_logprobs=2
    )
    (choice,) = reply.choices
    assert choice.message.content == ANSWER
    assert "".join(row.token for row in choice.logprobs.content) == ANSWER
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert choice.confidence is not None


def test_openai_calls_tools_and_sees_errors(client: Any, proxy: Proxied) -> None:
    openai = pytest.importorskip("openai")
    proxy.upstream.tool = True
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    reply = client.chat.completions.create(
        model="policy", messages=MESSAGES, tools=[{"type": "function", "function": function}]
    )
    assert reply.choices[0].message.tool_calls[0].function.name == "f"
    assert reply.choices[0].confidence is None
    proxy.upstream.error = (429, {"error": {"message": "slower"}})
    with pytest.raises(openai.RateLimitError, match="slower"):
        client.chat.completions.create(model="policy", messages=MESSAGES)


# ------------------------------------------------------------------------------------ dcpo evaluate


def says(body: dict[str, Any], index: int) -> str:
    """A function of the question and the seed; right answers are surer, and shorter."""
    question = body["messages"][-1]["content"]
    a, b = question.split("=")[0].split("*")
    seed = body.get("seed", 0)
    right = (seed + int(a)) % 3 != 0
    number = int(a) * int(b) if right else -1
    thought = "so " * (seed % 4 + (0 if right else 3))
    sure = 0.6 + 0.04 * (seed % 5) if right else 0.4 + 0.04 * (seed % 7)
    return f"{thought}\\boxed{{{number}}}\n<conf> Confidence: {sure:.2f}"


@pytest.fixture
def toy(tmp_path: Path) -> str:
    path = tmp_path / "toy.jsonl"
    rows = [{"problem": f"{a}*7=", "answer": str(7 * a)} for a in range(2, 32)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"toy={path}"


def evaluate(url: str, toy: str, out: Path, *more: str) -> dict[str, Any]:
    command = ["evaluate", "--endpoint", url, "--benchmarks", toy, "--out", str(out)]
    options = ["--template", "paper", "--temperature", "1", "--top-p", "1"]
    sizes = ["--top-k", "0", "--max-tokens", "64", "--repeats", "4", "--resamples", "20"]
    assert main([*command, *options, *sizes, *more]) == 0
    return dict(json.loads((out / "evaluation.json").read_text()))


@pytest.mark.slow
def test_an_evaluation_fits_what_is_served_and_sees_no_difference(
    tmp_path: Path, toy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Evaluate, calibrate, serve: the same samples through the proxy, and the confidence of each
    answer is that of the evaluation with the same predictor.
    """
    upstream = Upstream()
    upstream.says = says
    with Served(upstream.app) as served:
        direct = evaluate(served.url, toy, tmp_path / "direct")
    file = tmp_path / "confidence.npz"
    fit = ["calibrate", "--samples", str(tmp_path / "direct" / "samples.jsonl")]
    assert main([*fit, "--held-out", "0.3", "--out", str(file)]) == 0
    record = Posthoc.load(file).record
    assert record is not None
    assert record.fitted_on is not None
    assert record.fitted_on.models == ("policy",)
    assert record.fitted_on.templates == ("paper",)
    assert record.fitted_on.temperatures == (1.0,)
    assert record.counts.sum() == len(record.held_out_correct) > 10
    calibrator = load_calibrator(file)
    with proxied(Scorer(calibrator), upstream) as proxy:
        same = evaluate(proxy.at.url, toy, tmp_path / "proxied")
        assert same == direct
        more = ("--calibrator", str(file))
        evaluate(proxy.at.url, toy, tmp_path / "again", *more)
        samples = read_samples(tmp_path / "again" / "samples.jsonl")
        assert len(samples) == 120
        by_text = {}
        for sample in samples:
            key = (sample.prompt.problem, sample.response.text)
            by_text[key] = sample.measures.posthoc_confidence
        asked = [body for body in upstream.asked if "seed" in body][-120:]
        for body in asked[:20]:
            own = {key: body[key] for key in body if not key.startswith("logprobs")}
            choice = proxy.choice(own)
            problem = body["messages"][-1]["content"].split("\n")[0]
            expected = by_text[problem, says(body, 0)]
            assert choice["confidence"] == pytest.approx(expected, abs=1e-12)
    capsys.readouterr()
